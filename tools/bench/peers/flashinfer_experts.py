"""FlashInfer's all-to-all of tokens and experts, in ``libmoe.so``: a dispatch and a combine."""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from commlib.tools.bench.peers.memory import PeerMemory
from commlib.tools.bench.peers.native import ADDRESSES, INT, POINTER, addresses, function
from commlib.tools.bench.peers.way import DTYPE

FLASHINFER = "FlashInfer"
COPIED = f"{FLASHINFER}, rows copied first"
PDL = 1

Tensor = torch.Tensor


class Tokens(NamedTuple):
    """The tokens that one rank sends, and the experts that they choose."""

    x: Tensor  # bfloat16, [tokens, width]
    ids: Tensor  # [tokens, choices]
    weights: Tensor  # float32, [tokens, choices]
    experts: int  # of all ranks


class FlashInferExperts:
    """The workspace of one rank: a slot per token and sender, and two sets of ready flags.

    FlashInfer alternates between the sets: a dispatch waits for the one, a combine for the other.
    Calls in a row of one kind would overwrite flags that a slower rank still waits for. So every
    call here takes the set that the call before it did not take.
    """

    def __init__(self, library: ctypes.CDLL, memory: PeerMemory, tokens: Tokens) -> None:
        """Set up together with the other ranks, each of which sends as many tokens."""
        if tokens.experts % memory.size:
            expected = f"expected a multiple of the {memory.size} ranks"
            raise ValueError(f"{tokens.experts} experts: {expected}; others are split differently")
        calls = (ADDRESSES, INT, INT, POINTER)
        self._send = function(library, "moe_dispatch", *(POINTER,) * 3, *(INT,) * 6, *calls)
        self._add = function(library, "moe_combine", *(POINTER,) * 2, *(INT,) * 5, *calls)
        self._memory, self._tokens = memory, tokens._replace(ids=tokens.ids.int())
        self._sizes = memory.size, *tokens.x.shape, tokens.ids.shape[1]
        layout = (ctypes.c_uint64 * 3)()
        function(library, "moe_layout", *(INT,) * 4, ADDRESSES)(*self._sizes, layout)
        nbytes, counts, rows = layout
        buffer, mapped = memory.shared(nbytes)
        self._workspaces, self._set = addresses(mapped), 0
        self._counts = buffer[counts : counts + 4 * memory.size].view(torch.int32)
        self._rows = buffer[rows : rows + memory.size * tokens.x.nbytes].view(DTYPE)
        self._out = torch.empty_like(tokens.x)

    def dispatches(self) -> dict[str, Callable[[], object]]:
        """Return the ways to send the tokens to the ranks of their experts."""
        return {FLASHINFER: self._dispatch}

    def combines(self) -> dict[str, Callable[[], Tensor]]:
        """Return the ways to add up what the ranks of the experts return.

        Experts return what they got in the last dispatch. They have written it into the workspace,
        or into other memory, from where a combine copies it first.
        """
        other = self._rows.data_ptr()
        return {FLASHINFER: partial(self._combine, None), COPIED: partial(self._combine, other)}

    def received(self) -> list[Tensor]:
        """Return the tokens that the last dispatch brought from each rank, in any order."""
        slots = self._rows.view(self._memory.size, *self._tokens.x.shape)
        return [rows[:count] for rows, count in zip(slots, self._counts.tolist(), strict=True)]

    def _dispatch(self) -> None:
        x, ids, weights, experts = self._tokens
        tensors = x.data_ptr(), ids.data_ptr(), weights.data_ptr()
        self._send(*tensors, self._memory.rank, *self._sizes, experts, *self._call())

    def _combine(self, rows: int | None) -> Tensor:
        self._add(rows, self._out.data_ptr(), self._memory.rank, *self._sizes, *self._call())
        return self._out

    def _call(self) -> tuple[object, ...]:
        """Return the last arguments of a launch; the next one takes the other flags."""
        taken, self._set = self._set, 1 - self._set
        return self._workspaces, taken, PDL, self._memory.stream()
