"""Exchanges between tokens and experts by one kernel each, where the engine has one."""

from functools import lru_cache
from typing import Any

import torch

from commlib.core.calls.call import Call
from commlib.core.dispatch import dispatch, is_plain
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES
from commlib.p2p.channel import ExpertKernels
from commlib.p2p.experts.tables import ExpertSpec

Tensor = torch.Tensor


@lru_cache(maxsize=256)
def _name_with_settings(
    collective: str, num_experts: int, capacity: int, top_k: int, quantize: bool
) -> str:
    """Return the call as it is compared and shown; equal numbers of rows may be other ones."""
    numbers = f"num_experts={num_experts}, capacity={capacity}, top_k={top_k}"
    return f"{collective}({numbers}{', quantize=fp8' if quantize else ''})"


class Experts(Ring):
    """The collectives of a ring that kernels of expert exchanges carry."""

    def _expert_kernels(self, spec: ExpertSpec) -> ExpertKernels | None:
        """Return the kernels for such calls; None without. All ranks decide alike.

        The first call sets a channel up, which blocks the host.
        """
        kernels = self._engine.prepare_experts()
        if kernels is None or not kernels.carries(spec):
            return None
        self._device_reports.watch(kernels)
        return kernels

    def _expert_call(
        self,
        collective: str,
        launch: Any,
        out: Tensor,
        x: Tensor,
        args: tuple[Any, ...],
        use_calc_stream: bool,
    ) -> None:
        """Launch one of the kernels: ``launch(out, x, *args)``.

        What ``args`` hold is dense, and the last of them is the ``ExpertSpec``.
        """
        # Ranks may differ in their tokens, but not in their rows.
        rows, spec = x if collective == "expert_combine" else out, args[-1]
        name = _name_with_settings(
            collective, spec.num_experts, spec.capacity, spec.top_k, spec.quantize
        )
        entry = (name, rows.numel(), x.dtype, None, None)
        call = Call(collective, launch, args, out, x, None, is_plain(self, x, x), entry, out)
        dispatch(self, call, MODES[use_calc_stream, True, True])
