"""`capture`: make a function or module one whose calls are replayed from graphs."""

import functools
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, overload

import torch
from typing_extensions import Unpack

from commlib.graph.captured_function import CapturedFunction
from commlib.graph.captured_module import CapturedModule
from commlib.graph.options import First, Gradients, Memory, OnFail, Options


class Given(TypedDict, total=False):
    """The options of ``capture``."""

    key: Callable[..., Any] | None
    warmup: int
    first: First
    inputs: Memory
    outputs: Memory
    gradients: Gradients
    agree: int | None
    on_fail: OnFail
    verify: bool | int | Literal["auto"] | None
    tolerance: tuple[float, float] | None
    max_graphs: int
    slots: int | None


P = ParamSpec("P")
R = TypeVar("R")


@overload
def capture(fn: torch.nn.Module, **options: Unpack[Given]) -> CapturedModule: ...


@overload
def capture(fn: Callable[P, R], **options: Unpack[Given]) -> CapturedFunction[P, R]: ...


@overload
def capture(
    fn: None = None, **options: Unpack[Given]
) -> Callable[[Callable[P, R]], CapturedFunction[P, R]]: ...


def capture(fn: Callable[..., Any] | None = None, **options: Unpack[Given]) -> Any:
    """Return ``fn`` as a function whose calls are captured once per kind and then replayed.

    The first call of a kind runs ``fn`` itself and counts. Later runs for the capture are undone.
    Calls are distinguished by structure, by shape, dtype, device, strides and ``requires_grad`` of
    tensors, and by the value of all else. They are also distinguished by torch's modes, by ``key``,
    and by what ``fn`` uses without receiving it (settings of modules and optimizers, closures).
    Where gradients flow, a forward and a backward graph are joined by one autograd node; second
    derivatives are unsupported. Every member of a ring captures the same collectives, or all of
    them raise.

    Args:
        fn: Function or module; arguments and results may be any pytree. ``@capture`` and
            ``@capture(...)`` work too.
        **options: Options by their names:
            key: Function of the arguments whose result becomes part of the key.
            warmup: Runs before the capture, including the call itself (2). At least one run
                follows the call unless ``first="warmup"``.
            first: "once" undoes a call whose capture fails. "warmup" copies nothing; the effects
                of the call are kept.
            inputs: "borrow" reads arguments where the first caller has them, and captures once
                more when one has moved. "copy" reads them from the graph's memory from the start:
                for arguments that are new tensors in each call.
            outputs: "borrow" returns memory of the graph, and reading it after the next replay
                raises. "copy" returns fresh tensors.
            gradients: "copy" returns fresh tensors from backwards. "borrow" returns memory of the
                graph on GPUs: zero_grad() before the next forward, else a use of it raises.
                "accumulate" adds those of weights to a ``.grad`` that is there, all by one kernel,
                where torch would do no more than that; else as "copy". Hooks before the nodes
                of weights get None then.
            agree: Number of a ring whose ranks compare their keys at every call; this blocks the
                host. It is for keys that come from a rank's own data.
            on_fail: "raise", or "eager" to run calls that can't be captured eagerly;
                ``report()`` says why.
            verify: "auto" (replays 1, 2, 10, 100, ...), N for every N-th, True for all, False or
                0 for none. None: as ``FLAGS_graph_verify`` says when ``capture`` is called.
            tolerance: (rtol, atol) of verified calls; None compares bits.
            max_graphs: Kinds that are captured (64); calls of further kinds run eagerly.
            slots: Calls of a kind that can wait for their backward at the same time. They are all
                captured with the first; a call beyond them runs eagerly. None: one more slot is
                captured whenever more calls wait than ever before.

    Returns:
        A ``CapturedFunction``; for a module a ``CapturedModule``, which is a module too.

    Raises:
        GraphError: An option is wrong. Calls raise it where they can't be captured, or differ.
    """
    if fn is None:
        return functools.partial(capture, **options)
    checked = Options.of(dict(options))
    if isinstance(fn, torch.nn.Module):
        return CapturedModule(fn, checked)
    return CapturedFunction(fn, checked)
