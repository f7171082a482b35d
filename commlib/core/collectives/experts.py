"""Exchanges between tokens and experts by one kernel each, where the engine has one."""

from typing import Any

import torch

from commlib.core.call import Call
from commlib.core.dispatch import dispatch, is_plain
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES
from commlib.p2p.channel import ExpertKernels
from commlib.p2p.expert_tables import ExpertSpec

Tensor = torch.Tensor


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
        """Launch one of the kernels: ``launch(out, x, *args)``. What ``args`` hold is dense."""
        # Ranks may differ in their tokens, but not in their rows.
        rows = x if collective == "expert_combine" else out
        entry = (collective, rows.numel(), x.dtype, None, None)
        call = Call(collective, launch, args, out, x, None, is_plain(self, x, x), entry, out)
        dispatch(self, call, MODES[use_calc_stream, True, True])
