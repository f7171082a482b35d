"""The exchange of activations and gradients between pipeline stages: ``P2pHelper``.

A stage first sends the shapes and dtypes of its output to the next one, once. Everything that one
call sends and receives is launched together, so that stages can't wait for each other in a circle.
"""

from collections import deque
from typing import Any, NamedTuple

import torch

from commlib.compat.paddle.distributed.groups import Group
from commlib.compat.paddle.distributed.hybrid_group import hybrid_group
from commlib.compat.paddle.distributed.pp_utils.slices import (
    P2PonCalcStream,
    _recv_on_calc_stream,
    _send_on_calc_stream,
    allgather_partial,
    batch_send_recv_on_calc_stream,
)
from commlib.compat.paddle.point_to_point import _CODES
from commlib.errors import ArgumentError, ShapeError

Tensor = torch.Tensor
Tensors = Tensor | tuple[Tensor, ...] | None
_HEADER = 128  # numbers; the first message between two stages
_NUMBERS = {dtype: number for number, dtype in _CODES.items()}


class _Form(NamedTuple):
    """Shapes, dtypes and requires_grad of what a stage sends, and whether it is a tuple."""

    is_tuple: bool
    parts: tuple[tuple[torch.dtype, bool, tuple[int, ...]], ...]

    def header(self) -> list[int]:
        """Return the form as numbers."""
        numbers = [int(self.is_tuple), len(self.parts)]
        for dtype, has_grad, shape in self.parts:
            numbers += [_NUMBERS[dtype], int(has_grad), len(shape), *shape]
        return numbers

    def fits(self, known: "_Form") -> bool:
        """Return True if the other stage, which knows ``known``, can receive this form.

        What required grad in training need not in evaluation; the reverse would lose gradients.
        """
        if self.is_tuple != known.is_tuple or len(self.parts) != len(known.parts):
            return False
        return all(
            own[::2] == other[::2] and own[1] <= other[1]
            for own, other in zip(self.parts, known.parts, strict=True)
        )

    def new(self, device: torch.device, *, grads: bool = False) -> Tensors:
        """Return empty tensors; ``grads``: for gradients, which some tensors of a tuple lack."""
        parts = [part for part in self.parts if part[1] or not (grads and self.is_tuple)]
        made = tuple(
            torch.empty(shape, dtype=dtype, device=device, requires_grad=has_grad and not grads)
            for dtype, has_grad, shape in parts
        )
        return made if self.is_tuple else made[0]


class P2pHelper:
    """Sends to and receives from the stages before and after this one, on the current stream.

    Tensors that every tensor-parallel rank has whole travel in slices; see ``pp_utils.slices``. A
    ``Tensors`` is a tensor or a tuple of tensors. The first and the last stage, which have nobody
    on one side, get None there.
    """

    def __init__(self, use_cache: bool = True) -> None:
        """Choose how often forms are sent.

        Args:
            use_cache: True: all micro-batches have the form of the first one, which is sent once.
                False: each output is sent with its form, and gradients come in the order of the
                outputs that require grad.
        """
        self._use_cache = use_cache
        self._sent: _Form | None = None
        self._received: _Form | None = None
        self._awaited: deque[_Form] = deque()  # without the cache: outputs without gradients yet

    def clear_meta_cache(self) -> None:
        """Send and receive the form again with the next micro-batch."""
        self._sent = self._received = None
        self._awaited.clear()

    def recv_forward(
        self, pp_first_stage: bool, sync_recv: bool = True, batch_p2p_comm: bool = True
    ) -> Tensors:
        """Return the output of the stage before this one."""
        return self._exchange(recv_prev=not pp_first_stage)[0]

    def recv_backward(
        self, pp_last_stage: bool, sync_recv: bool = True, batch_p2p_comm: bool = True
    ) -> Tensors:
        """Return the gradients of this stage's output."""
        return self._exchange(recv_next=not pp_last_stage)[1]

    def send_forward(
        self, output_tensor: Tensors, pp_last_stage: bool, batch_p2p_comm: bool = True
    ) -> None:
        """Send this stage's output to the next one."""
        self._exchange(send_next=None if pp_last_stage else output_tensor)

    def send_backward(
        self, input_tensor_grad: Tensors, pp_first_stage: bool, batch_p2p_comm: bool = True
    ) -> None:
        """Send the gradients of this stage's input to the stage before it."""
        self._exchange(send_prev=None if pp_first_stage else input_tensor_grad)

    def send_forward_recv_backward(
        self, output_tensor: Tensors, pp_last_stage: bool, batch_p2p_comm: bool = True
    ) -> Tensors:
        """Send this stage's output, and return the gradients of an earlier one."""
        sent = None if pp_last_stage else output_tensor
        return self._exchange(send_next=sent, recv_next=not pp_last_stage)[1]

    def send_backward_recv_forward(
        self, input_tensor_grad: Tensors, pp_first_stage: bool, batch_p2p_comm: bool = True
    ) -> Tensors:
        """Send the gradients of this stage's input, and return a later input."""
        sent = None if pp_first_stage else input_tensor_grad
        return self._exchange(send_prev=sent, recv_prev=not pp_first_stage)[0]

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Tensors,
        input_tensor_grad: Tensors,
        recv_prev: bool,
        recv_next: bool,
        batch_p2p_comm: bool = True,
    ) -> tuple[Tensors, Tensors]:
        """Send both ways and receive both ways; return an input and gradients of an output."""
        return self._exchange(output_tensor, input_tensor_grad, recv_prev, recv_next)

    def _exchange(
        self,
        send_next: Tensors = None,
        send_prev: Tensors = None,
        recv_prev: bool = False,
        recv_next: bool = False,
    ) -> tuple[Tensors, Tensors]:
        """Return what comes from the stage before, and from the one after; None for nothing."""
        hybrid = hybrid_group()
        pipe = hybrid.get_pipe_parallel_group()
        before, after = hybrid._get_p2p_prev_rank(), hybrid._get_p2p_next_rank()
        unknown = None if send_next is None else self._noted(pipe, send_next)
        awaited = self._gradients(pipe) if recv_next else None
        self._agree(pipe, before if recv_prev else None, after, unknown)
        from_prev = self._received.new(pipe.ring.device) if recv_prev and self._received else None
        from_next = awaited.new(pipe.ring.device, grads=True) if awaited else None
        slices = hybrid.get_model_parallel_world_size(), hybrid.get_model_parallel_rank()
        calls = [
            P2PonCalcStream(op, tensor.detach(), peer, pipe, *slices)
            for op, tensors, peer in (
                # One rank may be on both sides: it receives in the order in which this one sends.
                (_send_on_calc_stream, send_prev, before),
                (_recv_on_calc_stream, from_next, after),
                (_send_on_calc_stream, send_next, after),
                (_recv_on_calc_stream, from_prev, before),
            )
            for tensor in _listed(tensors)
        ]
        if calls:
            batch_send_recv_on_calc_stream(calls)
        for tensor in (*_listed(from_prev), *_listed(from_next)):
            allgather_partial(tensor, *slices, hybrid.get_model_parallel_group())
        if not self._use_cache and recv_prev:
            self._received = None
        return from_prev, from_next

    def _noted(self, pipe: Group, output: Tensors) -> _Form | None:
        """Note the form of an output; return it if the next stage does not know it."""
        form = self._form(pipe, output)
        if not self._use_cache:
            if any(has_grad for _, has_grad, _ in form.parts):
                self._awaited.append(form)
            return form
        if self._sent is not None:
            return None
        self._sent = form
        return form

    def _gradients(self, pipe: Group) -> _Form:
        """Return the form of the output whose gradients come next."""
        oldest = self._awaited.popleft() if self._awaited else None
        form = self._sent if self._use_cache else oldest
        if form is None:
            raise ArgumentError(
                f"{pipe.ring._describe('P2pHelper')}: gradients of an output that was not sent, or "
                f"that does not require grad; call send_forward first"
            )
        return form

    def _agree(self, pipe: Group, before: int | None, after: int, unknown: _Form | None) -> None:
        """Send the form of the output, and receive that of the input, where they are not known."""
        sends, takes = None, None
        if unknown is not None:
            numbers = unknown.header()
            padded = numbers + [0] * (_HEADER - len(numbers))
            sends = torch.tensor(padded, device=pipe.ring.device)
        if before is not None and self._received is None:
            takes = torch.empty(_HEADER, dtype=torch.int64, device=pipe.ring.device)
        with pipe.ring.group():
            if sends is not None:
                pipe.ring.send(sends, peer=pipe.ranks.index(after))
            if takes is not None:
                pipe.ring.recv(takes, peer=pipe.ranks.index(before))  # type: ignore[arg-type]
        if takes is not None:
            self._received = _read(takes.tolist())

    def _form(self, pipe: Group, output: Tensors) -> _Form:
        """Return the form of this stage's output, which must fit the known one."""
        parts = [(one.dtype, one.requires_grad, tuple(one.shape)) for one in _listed(output)]
        form = _Form(isinstance(output, tuple), tuple(parts))
        if self._sent is not None and not form.fits(self._sent):
            raise ShapeError(
                f"{pipe.ring._describe('P2pHelper')}: the output is {form.parts}; expected "
                f"{self._sent.parts}, as in the first micro-batch; call "
                f"clear_meta_cache() on every stage, or pass use_cache=False"
            )
        if len(form.header()) > _HEADER:
            raise ShapeError(
                f"{pipe.ring._describe('P2pHelper')}: the output has {len(parts)} tensors, whose "
                f"shapes need {len(form.header())} numbers; expected at most {_HEADER}; send fewer "
                f"tensors"
            )
        return form


def _listed(tensors: Tensors) -> tuple[Tensor, ...]:
    if tensors is None:
        return ()
    return tensors if isinstance(tensors, tuple) else (tensors,)


def _read(numbers: list[Any]) -> _Form:
    """Return the form that another stage has sent as numbers."""
    is_tuple, count, *rest = numbers
    parts = []
    for _ in range(count):
        code, has_grad, dims, *rest = rest
        parts.append((_CODES[code], bool(has_grad), tuple(rest[:dims])))
        rest = rest[dims:]
    return _Form(bool(is_tuple), tuple(parts))
