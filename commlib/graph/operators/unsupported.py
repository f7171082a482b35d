"""Checks that reject what can't be captured, before it runs, with the line of the program."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from commlib.core.tensors import fault, has_memory
from commlib.errors import GraphError
from commlib.graph.operators.program_line import remedy_here, user_line
from commlib.graph.operators.schema import OpCall
from commlib.graph.operators.value_reads import OF_A_LIST
from commlib.streams import stream_captures

_aten = torch.ops.aten
_transform = torch._C._functorch.peek_interpreter_stack  # the innermost one of torch.func
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_CALLED = {  # as programs write them
    "_local_scalar_dense": "item",
    "_pack_padded_sequence": "pack_padded_sequence",
}
_NEEDED = "the host needs a value that the replay has not computed yet"
_REMEDY = {
    "item": "keep the value in a tensor (torch.where, clamp), or read it outside",
    OF_A_LIST: "use torch.stack, which makes one tensor of them, also for an index",
    "nonzero": "use a mask and torch.where, which keep the shape",
    "quantize_per_tensor": "pass scale and zero_point as numbers",
    "quantize_per_tensor_dynamic": "use quantize_per_tensor, with numbers",
    "tensor_split": "pass a list of integers",
    "_nested_tensor_from_mask": "create nn.TransformerEncoder with enable_nested_tensor=False",
}
_RESHAPED = {
    "resize_": "give it its size outside, or allocate another tensor",
    "resize_as_": "give it its size outside, or allocate another tensor",
    "set_": "set it outside, or use the other tensor",
}


def check_sync(call: OpCall, device: torch.device) -> None:
    """Raise ``GraphError`` for an operator that waits for the GPU, or would if there were one."""
    why = sync_reason(call, device)
    if why:
        name = _name_of(call)
        name = _CALLED.get(name, name)
        hint = _REMEDY.get(name, "do it outside, or mark the part with commlib.graph.eager")
        text = f"{name} can't be captured: {why}"
        raise _unsupported(text, name, remedy_here() or hint, reads=True)


def check_stray(call: OpCall, touched: Iterable[torch.Tensor]) -> None:
    """Raise ``GraphError`` for an operator on a stream outside the capture under way.

    It would run once, and never again; ``touched`` is what it has made or written.
    """
    if any(tensor.is_cuda for tensor in touched) and not stream_captures():
        name = _name_of(call)
        message = (
            f"{name} ran on a stream that is not part of the capture, so no replay would repeat it"
        )
        hint = "let it wait for the current stream first: stream.wait_stream(...)"
        raise _unsupported(message, name, hint)


def check_untransformed() -> None:
    """Raise ``GraphError`` for a call inside a transform of torch.func or forward-mode autograd."""
    if _transform() is not None or forward_ad._current_level >= 0:
        raise GraphError(
            "a captured function is called inside a transform (vmap, grad, jvp, jacfwd, "
            "functionalize, dual numbers, ...), which needs the function itself; capture the "
            "transformed function instead: graph.capture(torch.func.vmap(fn))"
        )


def check_untransformed_backward(grads: Iterable[torch.Tensor | None]) -> None:
    """Raise ``GraphError`` for the backward of a captured call inside a transform."""
    batched = [grad for grad in grads if grad is not None and _is_batched(grad)]
    if batched or _transform() is not None or forward_ad._current_level >= 0:
        raise GraphError(
            "the backward of a captured call runs inside a transform (vmap, is_grads_batched=True, "
            "jacobian(vectorize=True), dual numbers, ...), and a graph takes one plain gradient "
            "per output; call it with one gradient after the other, or call the function itself"
        )


def check_earlier_backward() -> None:
    """Raise ``GraphError`` for the backward of an earlier captured call, inside a function."""
    raise GraphError(
        "the function runs the backward of an earlier captured call, and no graph can hold another "
        "one; run that backward outside, or mark the part with commlib.graph.eager"
    )


def check_unreadable(tensors: Iterable[torch.Tensor]) -> None:
    """Raise ``GraphError`` for an argument whose values no graph could find at its address."""
    for i, tensor in enumerate(tensors):
        defect = fault(tensor, "the argument")
        if defect is None and not has_memory(tensor) and (tensor.numel() or tensor.is_meta):
            defect = f"is a {type(tensor).__name__} without memory", "pass a tensor that has memory"
        if defect is not None:
            reason, remedy = defect
            raise GraphError(
                f"tensor {i} of the arguments {reason}, and a graph can't read it; {remedy}"
            )


def check_value(name: str) -> None:
    """Raise ``GraphError`` for a method that reads the values of a tensor."""
    hint = remedy_here() or _REMEDY.get(name, _REMEDY["item"])
    raise _unsupported(f"{name} can't be captured: {_NEEDED}", name, hint, reads=True)


def check_changing(where: str, remedy: str | None) -> None:
    """Raise ``GraphError`` for a value that the host reads, and that each call changes."""
    hint = remedy or "keep it on the GPU (torch.where), or read it outside"
    raise GraphError(
        f"the host reads a value at {where} that the function itself changes at each call, so that "
        f"no graph would fit the next one; {hint}",
        where=where,
        hint=hint,
        reads=True,
    )


def check_reads(where: str, part: str) -> None:
    """Raise ``GraphError`` for a value that is read where no eager call could take over."""
    raise GraphError(
        f"the host reads a value of the program at {where}, in {part}, and a call with another "
        f"value could not be made eagerly from there; read it before, or mark the part with "
        f"commlib.graph.eager",
        where=where,
        reads=True,
    )


def check_wrappers(call: OpCall, tensors: Iterable[torch.Tensor]) -> None:
    """Raise ``GraphError`` for an operator on tensors without their own memory (DTensor)."""
    for tensor in tensors:
        defect = fault(tensor, "it")
        if defect is not None:
            name = _name_of(call)
            reason, remedy = defect
            text = f"{name} can't be captured: a tensor that it takes {reason}"
            raise _unsupported(text, name, f"capture what works on plain tensors; {remedy}")


def check_layouts(call: OpCall, tensors: Iterable[torch.Tensor]) -> None:
    """Raise ``GraphError`` for an operator on sparse or jagged tensors."""
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_nested:
            name = _name_of(call)
            kind = "jagged" if tensor.is_nested else "sparse"
            message = f"{name} of a {kind} tensor can't be captured: how much it holds may change"
            hint = "use a padded or dense one (sparse=False, to_dense())"
            raise _unsupported(message, name, _REMEDY.get(name, hint))


def check_reshaping(call: OpCall) -> None:
    """Raise ``GraphError`` for an operator that gives a tensor from outside another shape."""
    name = _name_of(call)
    message = f"{name} can't be captured: it changes the shape of a tensor from outside"
    hint = _RESHAPED.get(name, f"use {name.rstrip('_')}, which returns another tensor")
    raise _unsupported(message, name, hint)


def check_resized(nbytes: int, now: int) -> None:
    """Raise ``GraphError`` for memory from outside that has another size now."""
    message = (
        f"memory of {nbytes} bytes from outside has {now} bytes now (resize_): a replay would "
        f"write where it was"
    )
    raise _unsupported(message, "resize_", "keep its size, or allocate it in the function")


def check_unseen(tensors: Iterable[torch.Tensor]) -> None:
    """Raise ``GraphError`` for memory of the host that something has written past all operators."""
    for tensor in tensors:
        if tensor.device.type == "cpu":
            raise GraphError(
                f"the function writes {tensor.nbytes} bytes that it can reach, and no operator of "
                f"torch says so (NumPy, ctypes, an extension), so a replay would not write them; "
                f"make it an operator (torch.library.custom_op, mutates_args=...), or mark the "
                f"part with commlib.graph.eager"
            )


def check_tied(tied: Sequence[torch.Tensor]) -> None:
    """Raise ``GraphError`` for outside memory that has become a part of an autograd graph."""
    if tied:
        raise GraphError(
            f"the function writes a value that requires grad into a {tuple(tied[0].shape)} tensor "
            f"from outside; write x.detach(), or return the value"
        )


def check_continued(i: int) -> None:
    """Raise ``GraphError`` for an argument whose autograd history a write has continued."""
    raise GraphError(
        f"the function writes in place to tensor {i} of its arguments, whose gradient flows back "
        f"through that write, but a replay could not continue its history; write to a clone in the "
        f"function, and return it"
    )


def check_wanting(given: Iterable[torch.Tensor], wanted: Iterable[bool]) -> None:
    """Raise ``GraphError`` for an argument whose ``requires_grad`` the function has changed.

    ``wanted``: their ``requires_grad`` before the call.
    """
    for i, (tensor, before) in enumerate(zip(given, wanted, strict=True)):
        if tensor.requires_grad != before:
            raise GraphError(
                f"the function sets requires_grad of tensor {i} of its arguments to "
                f"{tensor.requires_grad}, but a replay would not; set it before the call, or set "
                f"that of x.detach()"
            )


def check_python_random() -> None:
    """Raise ``GraphError`` for a function that draws from Python's or NumPy's generator."""
    raise GraphError(
        "the function draws from Python's or NumPy's generator of random numbers, and a graph "
        "would repeat the number; draw before the call and pass a tensor, or use torch.rand in it"
    )


def check_hidden(modules: Iterable[torch.nn.Module]) -> None:
    """Raise ``GraphError`` for modules whose work, on a CPU, no operator shows."""
    for module in modules:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise GraphError(
                "DistributedDataParallel averages gradients outside torch's operators, so that a "
                "graph on a CPU would leave that out; capture its module, and average with "
                "commlib.ops.all_reduce(grad, op='avg')"
            )


def check_borrowed(call: OpCall) -> None:
    """Raise ``GraphError`` for a write to an array that the function has made a tensor of."""
    name = _name_of(call)
    message = f"{name} can't be captured: it writes to an array, which may be another next time"
    raise _unsupported(
        message, name, "make the tensor outside, or a new one: torch.tensor, torch.zeros"
    )


def check_seeding() -> None:
    """Raise ``GraphError`` for a function that sets or makes a generator it draws from."""
    message = (
        "the function sets a generator (manual_seed, fork_rng, a checkpoint with dropout) or makes "
        "one, and a graph only draws on"
    )
    raise _unsupported(message, "manual_seed", "set it before the call")


def _unsupported(what: str, name: str, hint: str, *, reads: bool = False) -> GraphError:
    line = user_line()
    return GraphError(f"{what}; at {line}; {hint}", op=name, where=line, hint=hint, reads=reads)


def _name_of(call: OpCall) -> str:
    """Return the name of an operator as programs write it."""
    return str(call.func.name()).removeprefix("aten::").partition(".")[0]


def sync_reason(call: OpCall, device: torch.device) -> str | None:
    """Return why an operator waits for the GPU, or would if there were one; None if it does not."""
    if not call.known.waits:
        return None
    if device.type != "cpu" and call.is_led_by_host:
        return None  # the host's part of the call
    if call.known.copies:
        return _copy(call, device)
    if not call.known.indexed:
        return None if call.kwargs.get("output_size") is not None else _NEEDED
    masks = [i for i in call.args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if masks and not _fills_masked(call.func, call.args):
        return "the shape of an index by a mask depends on its values"
    return None


def _fills_masked(func: Any, args: Sequence[Any]) -> bool:
    """Return True for a number written where a mask says: torch has a kernel for that."""
    if func is _aten.index.Tensor or (len(args) > 3 and args[3]):
        return False
    indices = [i for i in args[1] if i is not None]
    value: torch.Tensor = args[2]
    return len(indices) == 1 and value.numel() == 1 and value.device.type == "cpu"


def _copy(call: OpCall, device: torch.device) -> str | None:
    """Say why a copy from the GPU to the host can't be replayed."""
    args = call.args
    if call.func is _aten.copy_.default:
        source, target = args[1].device, args[0].device
    else:
        source, target = args[0].device, call.kwargs.get("device") or args[0].device
    if source.type == "cpu" or device.type == "cpu" or source.type == target.type:
        return None
    return f"it copies from {source} to {target}, and the host waits for it"
