"""The exchange of activations and gradients between pipeline stages: ``P2pHelper``.

A stage first sends the shapes and dtypes of its output to the next one. Everything that one call
sends and receives is launched together, so that stages can't wait for each other in a circle.
"""

from collections import deque
from typing import NamedTuple

import torch

from commlib.compat.paddle.distributed.groups import Group
from commlib.compat.paddle.distributed.hybrid_group import HybridCommunicateGroup, hybrid_group
from commlib.compat.paddle.distributed.point_to_point import P2POp, batch_isend_irecv, irecv, isend
from commlib.compat.paddle.distributed.pp_utils import forms as meta
from commlib.compat.paddle.distributed.pp_utils.forms import Form, Tensors
from commlib.compat.paddle.distributed.pp_utils.slices import (
    P2PonCalcStream,
    _recv_on_calc_stream,
    _send_on_calc_stream,
    allgather_partial,
    batch_send_recv_on_calc_stream,
)
from commlib.compat.paddle.distributed.tasks import Task
from commlib.core import observers
from commlib.errors import ArgumentError, ShapeError

Tasks = list[Task] | None


class _Message(NamedTuple):
    """A tensor that is sent to or received from a neighbour."""

    sends: bool
    tensor: torch.Tensor
    peer: int


class P2pHelper:
    """Sends to and receives from the stages before and after this one.

    A ``Tensors`` is a tensor or a tuple of tensors. The first and the last stage, which have nobody
    on one side, get None there. With ``batch_p2p_comm=True`` a call runs on the current stream, and
    tensors that every tensor-parallel rank has whole travel in slices; see ``pp_utils.slices``.
    With False they travel whole, on the comm stream of the pipeline's ring. Both sides pass the
    same value. ``sync_recv`` and ``skip_check_meta`` are ignored: every form is checked.
    """

    def __init__(self, use_cache: bool = True, dynamic_shape: bool = False) -> None:
        """Choose how often shapes and dtypes (forms) are sent.

        Args:
            use_cache: True: all micro-batches have the form of the first one, which is sent once.
                False: each output is sent with its form, and gradients come in the order of the
                outputs that require grad.
            dynamic_shape: True: micro-batches have different forms, and gradients are sent with
                their forms too. With ``use_cache`` each call of a step that sends or receives has
                the form that it had in the first step: set ``_dynamic_cnt`` to 0 on every stage
                before each step, as upstream's pipelines do.
        """
        self._use_cache, self._dynamic_shape = use_cache, dynamic_shape
        self._dynamic_cnt = 0  # the calls of this step; upstream's pipelines set it
        self._known: dict[tuple[int, str], Form] = {}  # by call and by direction
        self._awaited: deque[Form] = deque()  # of outputs without gradients yet

    def clear_meta_cache(self) -> None:
        """Send and receive the forms again with the next micro-batch."""
        self._known.clear()
        self._awaited.clear()
        self._dynamic_cnt = 0

    def recv_forward(
        self, pp_first_stage: bool, sync_recv: bool = True, batch_p2p_comm: bool = True
    ) -> Tensors:
        """Return the output of the stage before this one."""
        return self._exchange(recv_prev=not pp_first_stage, batch=batch_p2p_comm)[0]

    def recv_backward(
        self, pp_last_stage: bool, sync_recv: bool = True, batch_p2p_comm: bool = True
    ) -> Tensors:
        """Return the gradients of this stage's output."""
        return self._exchange(recv_next=not pp_last_stage, batch=batch_p2p_comm)[1]

    def send_forward(
        self,
        output_tensor: Tensors,
        pp_last_stage: bool,
        batch_p2p_comm: bool = True,
        skip_check_meta: bool = False,
    ) -> None:
        """Send this stage's output to the next one."""
        sent = None if pp_last_stage else output_tensor
        self._exchange(send_next=sent, batch=batch_p2p_comm)

    def send_backward(
        self, input_tensor_grad: Tensors, pp_first_stage: bool, batch_p2p_comm: bool = True
    ) -> None:
        """Send the gradients of this stage's input to the stage before it."""
        sent = None if pp_first_stage else input_tensor_grad
        self._exchange(send_prev=sent, batch=batch_p2p_comm)

    def send_forward_recv_backward(
        self, output_tensor: Tensors, pp_last_stage: bool, batch_p2p_comm: bool = True
    ) -> Tensors:
        """Send this stage's output, and return the gradients of an earlier one."""
        sent = None if pp_last_stage else output_tensor
        return self._exchange(sent, recv_next=not pp_last_stage, batch=batch_p2p_comm)[1]

    def send_backward_recv_forward(
        self, input_tensor_grad: Tensors, pp_first_stage: bool, batch_p2p_comm: bool = True
    ) -> Tensors:
        """Send the gradients of this stage's input, and return a later input."""
        sent = None if pp_first_stage else input_tensor_grad
        return self._exchange(None, sent, not pp_first_stage, batch=batch_p2p_comm)[0]

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Tensors,
        input_tensor_grad: Tensors,
        recv_prev: bool,
        recv_next: bool,
        batch_p2p_comm: bool = True,
        skip_check_meta: bool = False,
    ) -> tuple[Tensors, Tensors]:
        """Send both ways and receive both ways; return an input and gradients of an output."""
        sent = output_tensor, input_tensor_grad
        return self._exchange(*sent, recv_prev, recv_next, batch_p2p_comm)[:2]

    def send_forward_recv_forward(
        self,
        output_tensor: Tensors,
        recv_prev: bool,
        batch_p2p_comm: bool = True,
        overlap_p2p_comm: bool = False,
        skip_check_meta: bool = False,
    ) -> Tensors | tuple[Tensors, Tasks]:
        """Send an output, or None for nothing, and return a later input.

        With ``overlap_p2p_comm`` the tasks follow. The caller waits for them before it reads the
        input or changes the output. They are None with ``batch_p2p_comm``, as upstream.
        """
        wait = not overlap_p2p_comm
        got = self._exchange(output_tensor, None, recv_prev, False, batch_p2p_comm, wait)
        return got[0] if wait else got[::2]

    def send_backward_recv_backward(
        self,
        input_tensor_grad: Tensors,
        recv_next: bool,
        batch_p2p_comm: bool = True,
        overlap_p2p_comm: bool = False,
    ) -> Tensors | tuple[Tensors, Tasks]:
        """Send the gradients of an input, or None for nothing, and return those of an output.

        ``overlap_p2p_comm`` is as in ``send_forward_recv_forward``.
        """
        wait = not overlap_p2p_comm
        got = self._exchange(None, input_tensor_grad, False, recv_next, batch_p2p_comm, wait)
        return got[1] if wait else got[1:]

    def _exchange(
        self,
        send_next: Tensors = None,
        send_prev: Tensors = None,
        recv_prev: bool = False,
        recv_next: bool = False,
        batch: bool = True,
        wait: bool = True,
    ) -> tuple[Tensors, Tensors, Tasks]:
        """Return what comes from the stage before, and from the one after; None for nothing."""
        hybrid = hybrid_group()
        forms = self._agree(hybrid, send_next, send_prev, recv_prev, recv_next)
        device = hybrid.get_pipe_parallel_group().ring.device
        from_prev, from_next = (None if form is None else form.new(device) for form in forms)
        before, after = hybrid._get_p2p_prev_rank(), hybrid._get_p2p_next_rank()
        messages = [
            _Message(sends, tensor.detach(), peer)
            for sends, tensors, peer in (
                # One rank may be on both sides: it receives in the order in which this one sends.
                (True, send_prev, before),
                (False, from_next, after),
                (True, send_next, after),
                (False, from_prev, before),
            )
            for tensor in meta.listed(tensors)
        ]
        tasks = _launched(hybrid, messages, batch) if messages else None
        for task in (tasks or []) if wait else []:
            task.wait()
        if messages and self._dynamic_shape:
            self._dynamic_cnt += 1
        return from_prev, from_next, tasks

    def _agree(
        self,
        hybrid: HybridCommunicateGroup,
        send_next: Tensors,
        send_prev: Tensors,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Form | None, Form | None]:
        """Return the forms of what comes, after those that are not known were exchanged."""
        pipe = hybrid.get_pipe_parallel_group()
        before, after = hybrid._get_p2p_prev_rank(), hybrid._get_p2p_next_rank()
        sends: list[tuple[str, Form, int]] = []
        takes: list[tuple[str, int]] = []
        if send_prev is not None and self._dynamic_shape:
            sends.append(("to prev", self._form(pipe, "to prev", send_prev), before))
        if send_next is not None:
            sends.append(("to next", self._form(pipe, "to next", send_next), after))
        gradients = None
        if recv_next and not self._dynamic_shape:
            gradients = self._gradients(pipe, sends)
        elif recv_next:
            takes.append(("from next", after))
        if recv_prev:
            takes.append(("from prev", before))
        received = self._exchanged(pipe, sends, takes)
        if not self._use_cache and not self._dynamic_shape:
            self._awaited.extend(form for _, form, _ in sends if form.has_grad())
            if recv_next:
                self._awaited.popleft()
        return received.get("from prev"), received.get("from next", gradients)

    def _form(self, pipe: Group, direction: str, tensors: Tensors) -> Form:
        """Return the form of what is sent, which must fit the known one."""
        form = meta.form_of(pipe.ring, tensors)
        cached = self._known.get((self._dynamic_cnt, direction))
        if cached is not None and not form.fits(cached):
            raise ShapeError(
                f"{pipe.ring._describe('P2pHelper')}: sends {form.parts}; expected {cached.parts}, "
                f"as in the first micro-batch; call clear_meta_cache() on every stage, or pass "
                f"use_cache=False"
            )
        return form

    def _gradients(self, pipe: Group, sends: list[tuple[str, Form, int]]) -> Form:
        """Return the form of the gradients that come next, from that of their output."""
        output = [form for _, form, _ in sends]
        if self._use_cache:
            awaited = [*filter(None, [self._known.get((0, "to next"))]), *output]
        else:
            awaited = [*self._awaited, *(form for form in output if form.has_grad())]
        if not awaited:
            raise ArgumentError(
                f"{pipe.ring._describe('P2pHelper')}: gradients of an output that was not sent, or "
                f"that does not require grad; call send_forward first"
            )
        return awaited[0].gradients()

    def _exchanged(
        self, pipe: Group, sends: list[tuple[str, Form, int]], takes: list[tuple[str, int]]
    ) -> dict[str, Form]:
        """Return the forms of what comes, after messages about those that are not known."""
        ring, call = pipe.ring, self._dynamic_cnt
        news = [one for one in sends if (call, one[0]) not in self._known]
        forms = {way: self._known[call, way] for way, _ in takes if (call, way) in self._known}
        messages = {
            way: torch.empty(meta.LENGTH, dtype=torch.int64, device=ring.device)
            for way, _ in takes
            if way not in forms
        }
        if (news or messages) and not self._use_cache and observers.captured():
            raise ArgumentError(
                f"{ring._describe('P2pHelper')}: use_cache=False inside a capture, where the shape "
                f"can't be read; pass use_cache=True, or call it in plain eager code"
            )
        with ring.group():
            for _, form, peer in news:
                ring.send(form.message(ring.device), peer=pipe.ranks.index(peer))
            for way, peer in takes:
                if way in messages:
                    ring.recv(messages[way], peer=pipe.ranks.index(peer))
        received = {way: meta.read(message.tolist()) for way, message in messages.items()}
        if self._use_cache:
            learned = {**{way: form for way, form, _ in news}, **received}
            self._known |= {(call, way): form for way, form in learned.items()}
        return forms | received


def _launched(hybrid: HybridCommunicateGroup, messages: list[_Message], batch: bool) -> Tasks:
    """Launch everything together; return the tasks of calls on the comm stream."""
    pipe, model = hybrid.get_pipe_parallel_group(), hybrid.get_model_parallel_group()
    if not batch:
        calls = [
            P2POp(isend if one.sends else irecv, one.tensor, one.peer, pipe) for one in messages
        ]
        return batch_isend_irecv(calls)
    slices = model.nranks, model.rank
    ops = (_recv_on_calc_stream, _send_on_calc_stream)
    batch_send_recv_on_calc_stream(
        [P2PonCalcStream(ops[one.sends], one.tensor, one.peer, pipe, *slices) for one in messages]
    )
    for one in messages:
        if not one.sends:
            allgather_partial(one.tensor, *slices, model)
    return None
