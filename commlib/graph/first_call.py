"""The first call of a kind: it is made, rehearsed, and captured."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_leaves

from commlib.graph.backends import cuda as cuda_backend
from commlib.graph.backends.base import Backend, CpuBackend
from commlib.graph.call_keys import Reach
from commlib.graph.calls.cache_key import Arguments
from commlib.graph.calls.output_guard import guards_memory
from commlib.graph.options import Options
from commlib.graph.recording.counted_call import CountedCall
from commlib.graph.recording.findings import Findings
from commlib.graph.recording.recorded_call import Recipe
from commlib.graph.recording.rehearsal import rehearse
from commlib.graph.recording.replay_times import FunctionTimes
from commlib.graph.replaying.captured_call import CapturedCall
from commlib.graph.replaying.compare import Noise
from commlib.graph.replaying.entries import Entry
from commlib.graph.replaying.outcome import Unequal
from commlib.graph.replaying.schedule import Schedule
from commlib.graph.replaying.slot import Slot
from commlib.graph.replaying.slots import Slots
from commlib.graph.replaying.verification_log import VerificationLog


class FirstCall:
    """The way of one call to an entry: ``make``, then inside ``put_back``: ``rehearse``, ``entry``.

    Attributes:
        findings: What is known of the function.
        counted: The call itself.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        options: Options,
        schedule: Schedule,
        device: torch.device,
        reach: Reach,
        times: FunctionTimes | None,
    ) -> None:
        self._times = times
        self._fn, self._options, self._schedule = fn, options, schedule
        self._backend = backend_of(device)
        self.findings = Findings(weakref.WeakSet(reach.modules), reach.stepped)
        self.counted = CountedCall(
            fn,
            self._backend,
            self.findings,
            counted=options.first == "warmup",
            weights=[*filter(_has_grads, reach.weights), *reach.stepped],
        )

    def rehearse(self, call: Arguments) -> None:
        """Run the function as often as the options say, and record what a graph must do."""
        least = 0 if self._options.first == "warmup" else 1
        times = max(least, self._options.warmup - 1)
        rehearse(self._fn, self._backend, self.counted, call, times)

    def entry(self, call: Arguments, differs: Callable[[Unequal], None]) -> Entry:
        """Capture the call; ``differs`` gets a backward that differs from the function's."""
        findings, options = self.findings, self._options
        unseen = findings.unseen_in(call.tensors)
        copy, own_inputs = options.outputs == "copy", options.inputs == "copy"
        own_inputs = own_inputs or self._backend.copies_arguments
        borrows = options.gradients == "borrow"
        recipe = Recipe(
            self._fn,
            self._backend,
            findings,
            copy,
            self._times,
            own_inputs,
            unseen=unseen,
            gradients="copy" if borrows and not guards_memory else options.gradients,
        )
        log = functools.partial(VerificationLog, self._fn, options.tolerance, Noise())
        if findings.differentiable:
            slots = Slots(
                lambda: Slot(recipe, log(), differs), self._fn, self._schedule, options.slots
            )
            slots.capture(call)
            results = tree_leaves(self.counted.result)
            self._backend.trim_after_backward([x for x in results if isinstance(x, torch.Tensor)])
            return slots
        rooms = findings.rooms(self._backend.device)
        captured = CapturedCall(recipe._replace(rooms=rooms), log(), self._schedule)
        captured.capture(call)
        return captured


def _has_grads(x: torch.Tensor) -> bool:
    """Return True for a leaf that may have a gradient; a frozen parameter may still have one."""
    return x.requires_grad or isinstance(x, torch.nn.Parameter)


def backend_of(device: torch.device) -> Backend:
    """Return what captures on a device."""
    if device.type == "cpu":
        return CpuBackend()
    return cuda_backend.of_gpu(
        torch.cuda.current_device() if device.index is None else device.index
    )


def makes_parameters(modules: Sequence[torch.nn.Module], call: Arguments) -> bool:
    """Return True if lazy modules make parameters in the call, so that the next one is captured."""
    inner = [x for leaf in call.leaves if isinstance(leaf, torch.nn.Module) for x in leaf.modules()]
    lazy = [x for x in (*modules, *inner) if isinstance(x, LazyModuleMixin)]
    return any(x.has_uninitialized_params() for x in lazy)


def device_of(call: Arguments, module: torch.nn.Module | None) -> torch.device:
    """Return where a call runs: the GPU of its first tensor that has one, else the CPU.

    Tensors of ``module`` count too. A call without any tensor runs on the current GPU.
    """
    tensors = [*call.tensors]
    if module is not None:
        tensors += [*module.parameters(), *module.buffers()]
    for tensor in tensors:
        if tensor.device.type == "cuda":
            return tensor.device
    if tensors or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
