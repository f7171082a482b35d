"""Record a call of a function: its graphs, what they return, and what they bind."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_unflatten

from commlib.core.tensors import parts, rebuilt
from commlib.errors import GraphError
from commlib.graph.backends.base import Backend, Pool
from commlib.graph.calls.bindings import check_hidden, holds_tensor
from commlib.graph.calls.cache_key import Arguments
from commlib.graph.calls.lasting import Lasting, can_be_copied
from commlib.graph.calls.leaves import Tensors, leaf, with_grads, without_grads
from commlib.graph.calls.outputs import flat, standing
from commlib.graph.calls.views import views_among
from commlib.graph.operators.layout import fill
from commlib.graph.python.changes import Change
from commlib.graph.python.python_state import PythonState
from commlib.graph.recording.findings import Findings
from commlib.graph.recording.inputs import Inputs, Touched
from commlib.graph.recording.record import record
from commlib.graph.recording.replay_times import FunctionTimes
from commlib.graph.recording.segments import Segments
from commlib.graph.watching.outside_reads import keys_of
from commlib.graph.watching.runs import DonePart

Bound = list[tuple[torch.Tensor, torch.Tensor | None]]  # leaves, and what is bound as their grads


class Recipe(NamedTuple):
    """Settings for recording the calls of one kind.

    Attributes:
        fn: The function.
        backend: What captures it.
        findings: What the runs before the capture have shown.
        copy: Whether outputs are copies.
        times: Where the times of replays are kept.
        own_inputs: Whether arguments are read from the graphs' own memory from the start.
        rooms: For each leaf of the result, its memory if the graph makes it.
        unseen: Tensors that it writes, and no operator says so: of the arguments their positions.
        pool: Its own memory, in place of what all graphs share.
        gradients: What becomes of them in backwards: the option of ``capture``.
    """

    fn: Callable[..., Any]
    backend: Backend
    findings: Findings
    copy: bool
    times: FunctionTimes | None
    own_inputs: bool = False
    rooms: Sequence[torch.Tensor | None] = ()
    unseen: Sequence[torch.Tensor | int] = ()
    pool: Pool | None = None
    gradients: str = "copy"


class RecordedCall(NamedTuple):
    """A call that was recorded.

    Attributes:
        segments: Its graphs.
        result: What it returns, in memory that no other graph's replay writes.
        given: The tensors that it was recorded with.
        arguments: Memory of the call's tensors, and of the graphs' copies of them.
        grads: The gradients that it gives to leaves.
        bindings: What it binds to names.
        saved: The memory that autograd has saved for a backward.
    """

    segments: Segments
    result: Any
    given: Tensors
    arguments: set[int]
    grads: Bound
    bindings: list[Change]
    saved: set[int]


def record_call(
    recipe: Recipe,
    call: Arguments,
    inputs: Inputs,
    *,
    again: bool,
    done: Sequence[DonePart] | None = None,
) -> RecordedCall:
    """Record a call, whose arguments the graphs read where ``inputs`` says.

    Args:
        recipe: How calls of its kind are recorded.
        call: The call.
        inputs: The addresses of its arguments. Use of that memory is recorded here.
        again: The call was recorded before, and no other rank is asked.
        done: What its eager parts have done already in a verified call.

    Raises:
        GraphError: It can't be captured. The capture leaves nothing.
    """
    findings = recipe.findings
    read = inputs.of(call)
    new_args = with_grads(list(map(leaf, read)) if findings.differentiable else read, call.tensors)
    arguments = keys_of((*call.tensors, *read))
    findings.arguments |= arguments
    args, kwargs = call.rebuilt(new_args)
    saved = set[int]()

    def function(segments: Segments) -> tuple[Any, Bound, list[Change]]:
        objects = PythonState(findings.roots)
        if recipe.unseen:
            unseen = (read[x].detach() if isinstance(x, int) else x for x in recipe.unseen)
            segments.recorders[-1].note_unseen(unseen)
        with _saving(saved) if findings.differentiable else nullcontext():
            result = recipe.fn(*args, **kwargs)
            grads = [(x, x.grad) for x, grad in before if x.grad is not grad]
            bindings = _bound(objects, findings, segments) if findings.roots else []
        segments.own = len(segments.names)  # what follows is not work of the function
        inputs.touched = Touched.by(segments, read)
        _check_grads(call, inputs.touched)
        inputs.check_overlaps(call.tensors)
        return _kept(result, new_args, segments, recipe), grads, bindings

    with reading(call, new_args), kept_grads(findings.leaves) as before:
        segments, (result, grads, bindings) = record(
            recipe.backend,
            findings,
            function,
            part="forward",
            again=again,
            pool=recipe.pool,
            done=done,
            times=recipe.times.of("forward", recipe.backend.device) if recipe.times else None,
        )
    without_grads(new_args, call.tensors)
    inputs.fix(read)
    return RecordedCall(segments, result, new_args, arguments, grads, bindings, saved)


def _saving(saved: set[int]) -> AbstractContextManager[object]:
    """Save memory, whatever is written there later: a replay of the forward comes between."""

    # Autograd's graph holds this function, and a slot holds that graph: a reference to the slot
    # would close a cycle that the garbage collector can't see.
    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.update(part.untyped_storage()._cdata for part in parts(x))
        packed: torch.Tensor = rebuilt(x, lambda part: part.data)
        return packed

    return saved_tensors_hooks(pack, lambda x: x)


def _bound(objects: PythonState, found: Findings, segments: Segments) -> list[Change]:
    """Return the tensors and new objects that the function has bound to names."""
    changes = [x for x in objects.changes() if (x.where, x.name) not in found.by_parts]
    check_hidden(changes, segments.has_made)
    return [x for x in changes if holds_tensor(x.now) or _is_new(x, found.lasting)]


def _is_new(change: Change, lasting: Lasting) -> bool:
    """Return True for an object that each call makes, and that a replay can copy."""
    return change.is_bound and lasting.misses(change.now) and can_be_copied(change.now, lasting)


def _check_grads(call: Arguments, touched: Touched) -> None:
    """Raise ``GraphError`` for a read of an argument's ``grad``: the next one's is elsewhere."""
    for i, tensor in enumerate(call.tensors[: len(call.tensors) - call.grads]):
        grad = tensor.grad if tensor.is_leaf and tensor.requires_grad else None
        key = None if grad is None else grad.untyped_storage()._cdata
        if key is not None and any(key == outer_key for outer_key, _ in touched.outside):
            raise GraphError(
                f"the function reads .grad of argument tensor {i}; a replay could not read the "
                f"gradient of the next call's tensor. Pass the gradient as an argument"
            )


def _kept(result: Any, given: Tensors, segments: Segments, recipe: Recipe) -> Any:
    """Copy results to memory that replays of other graphs do not write."""
    leaves, spec, lasting = *flat(result), recipe.findings.lasting
    # What is returned twice is one tensor.
    outputs: dict[int, Any] = {**views_among(leaves, given)} if len(leaves) > 1 else {}
    for i, each in enumerate(leaves):
        if id(each) not in outputs:
            outputs[id(each)] = output = standing(each, given, segments.has_made, lasting)
            buffer = recipe.rooms[i] if i < len(recipe.rooms) and not recipe.copy else None
            if buffer is not None:  # copies are cloned after each replay
                copy = fill if 0 in buffer.stride() else torch.Tensor.copy_
                source = output.detach() if output.requires_grad else output  # a detach is a step
                copy(buffer.requires_grad_(False), source)
                outputs[id(each)] = buffer.requires_grad_(output.requires_grad)
    return tree_unflatten([outputs[id(each)] for each in leaves], spec)


@contextmanager
def kept_grads(leaves: Sequence[torch.Tensor]) -> Iterator[Bound]:
    """Restore the gradients of leaves after a ``with`` block; yields those from before it."""
    before = [(each, each.grad) for each in leaves]
    try:
        yield before
    finally:
        for each, grad in before:
            each.grad = grad


@contextmanager
def reading(call: Arguments, inputs: Tensors) -> Iterator[None]:
    """Give owners the gradients that the graph reads, inside a ``with`` block."""
    owners, new_grads = call.owners, iter(inputs[len(inputs) - call.grads :])
    before = [owner.grad for owner in owners]
    for owner, grad in zip(owners, before, strict=True):
        owner.grad = None if grad is None else rebuilt(grad, lambda _: next(new_grads))
    try:
        yield
    finally:
        for owner, saved in zip(owners, before, strict=True):
            owner.grad = saved
