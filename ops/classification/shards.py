"""A class axis in shards: rank agreement, and the gather that joins the rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commlib.core.context import CommContext
from commlib.core.group import needs_result
from commlib.core.manager import comm
from commlib.core.validation import check_tensor
from commlib.errors import ArgumentError, DtypeError, ShapeError
from commlib.ops.agreement import Fact, by_rank, check_ranks_agree, refuse_together
from commlib.ops.classification.row_statistics import on_kernels, statistics
from commlib.ops.classification.rows import IGNORED, Rows, accumulates_in, shift_of
from commlib.ops.registered.library import needs_op, traced
from commlib.streams import sees_capture

Tensor = torch.Tensor

LOGITS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LABELS = (torch.int32, torch.int64)


def takes_registered_op(
    collective: str, logits: Tensor, label: Tensor, ring_id: int, use_calc_stream: bool
) -> bool:
    """Return True if a call has to take its registered op: if ``traced``, or for a gradient."""
    if traced(collective, use_calc_stream, True):  # the registered op checks the arguments
        return True
    ring = comm(ring_id)
    with refuse_together(
        ring, collective
    ):  # the dispatcher would answer for other devices by itself
        check_inputs(ring, collective, logits, label)
    return needs_op(logits, label) or (logits.requires_grad and torch.is_grad_enabled())


def check_inputs(ring: CommContext, collective: str, logits: Tensor, label: Tensor) -> None:
    """Raise for other dtypes or devices, a missing class axis, and an open group."""
    needs_result(ring, collective)
    for role, tensor, dtypes in (("logits", logits, LOGITS), ("label", label, LABELS)):
        check_tensor(ring, collective, role, tensor)
        if tensor.dtype not in dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            fit = "float" if dtypes is LOGITS else "long"
            raise DtypeError(
                f"{ring._describe(collective)}: {role} is {tensor.dtype}; expected one of {names}; "
                f"pass {role}.{fit}()"
            )
    if logits.dim() == 0:
        raise ShapeError(
            f"{ring._describe(collective)}: logits is 0-D; expected classes as its last axis"
        )


def flattened(logits: Tensor) -> Tensor:
    """Return the logits as [rows, classes], outside autograd."""
    return logits.detach().reshape(math.prod(logits.shape[:-1]), logits.shape[-1])


@dataclass(frozen=True)
class Shards:
    """The class axis over a ring: this rank has the classes from ``start`` on, all have ``total``.

    ``ignore_index`` is the label of ignored rows, or None.
    """

    ring: CommContext
    collective: str
    start: int
    total: int
    ignore_index: int | None

    def columns(self, labels: Tensor) -> Tensor:
        """Return ``labels`` [rows, ids] counted from this rank's first class, or ``IGNORED``."""
        columns = labels - self.start
        if self.ignore_index is None:
            return columns
        return columns.masked_fill_((labels == self.ignore_index).any(1, keepdim=True), IGNORED)

    def joined(
        self, rows: Rows, labels: Tensor, cosines: Tensor | None, use_calc_stream: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the loss [rows], and [2, rows]: shift and sum of exponentials.

        One all_gather carries labels and statistics of every rank. Raises ``ArgumentError`` on
        every rank for a bad row; with ``cosines`` [rows], 0 where another rank has the target, one
        beyond 1 is bad too. That waits for the GPU; a capture can't, there a bad row is NaN.
        """
        message = _Message.of(rows, labels, cosines)
        of_ranks = message.packed.new_empty((self.ring.size, message.packed.numel()))
        self.ring.all_gather(of_ranks, message.packed, use_calc_stream=use_calc_stream)
        loss, stats, first_bad = self._combined(message, of_ranks)
        if loss.numel() and not sees_capture(loss):
            row = int(first_bad)
            if row < loss.numel():
                raise ArgumentError(self._row_error(message, of_ranks, row))
        return loss, stats

    def _combined(self, message: "_Message", of_ranks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, statistics, and the first bad row, or as many as there are rows."""
        count, ids = message.labels.shape
        loss, stats = of_ranks.new_empty(count), of_ranks.new_empty((2, count))
        first_bad = torch.full((1,), count, dtype=torch.int32, device=of_ranks.device)
        if not count:
            return loss, stats, first_bad
        if on_kernels(of_ranks):
            from commlib.ops.classification import row_kernels

            cosines = len(message.stats) > 3
            options = self.total, self.ignore_index
            row_kernels.combine(
                of_ranks, message.offset, ids, cosines, *options, loss, stats, first_bad
            )
            return loss, stats, first_bad
        labels, parts = message.opened(of_ranks)
        bad = self._bad(labels, parts)
        shift = stats[0] = shift_of(parts[:, 0].amax(0))
        stats[1] = (parts[:, 1] * (parts[:, 0] - shift).exp_()).sum(0).masked_fill_(bad, torch.nan)
        torch.sub(stats[1].log(), parts[:, 2].sum(0) - shift, out=loss)
        loss.masked_fill_(self._ignored(labels[0]) & ~bad, 0)
        at = torch.arange(count, dtype=torch.int32, device=of_ranks.device)
        return loss, stats, at.masked_fill_(~bad, count).amin()

    def _ignored(self, labels: Tensor) -> Tensor:
        if self.ignore_index is None:
            return labels.new_zeros(len(labels), dtype=torch.bool)
        return (labels == self.ignore_index).any(1)

    def _bad(self, labels: Tensor, parts: Tensor) -> Tensor:
        """Return a mask of the bad rows.

        ``labels``: [size, rows, ids]; ``parts``: [size, 3 or 4, rows].
        """
        outside = (labels < 0) | (labels >= self.total)
        if self.ignore_index is not None:
            outside &= labels != self.ignore_index
        bad = (outside | (labels != labels[0])).any(2).any(0)
        return bad | (parts[:, 3].abs() > 1).any(0) if parts.shape[1] > 3 else bad

    def _row_error(self, message: "_Message", of_ranks: Tensor, row: int) -> str:
        """Return the error text for ``row``, the same on every rank."""
        labels, parts = (of_all[:, ..., row].tolist() for of_all in message.by_row(of_ranks))
        prefix = self.ring._describe(self.collective)
        if any(one != labels[0] for one in labels):
            by_value = by_rank([one if len(one) > 1 else one[0] for one in labels])
            return (
                f"{prefix}: label of row {row}: {by_value}; expected the same on every rank; "
                f"pass the labels of the whole batch on every rank"
            )
        unknown = [one for one in labels[0] if not 0 <= one < self.total]
        unknown = [one for one in unknown if one != self.ignore_index]
        if unknown:
            alternative = (
                "" if self.ignore_index is None else f" or ignore_index={self.ignore_index}"
            )
            return (
                f"{prefix}: label {unknown[0]} of row {row} is outside the {self.total} classes; "
                f"expected 0 to {self.total - 1}{alternative}"
            )
        rank, cosine = max(enumerate(part[3] for part in parts), key=lambda pair: abs(pair[1]))
        return (
            f"{prefix}: row {row} has the cosine {cosine:.9g} at its label {labels[0][0]}, on rank "
            f"{rank}; an angle needs -1 to 1; pass logits.clamp(-1, 1)"
        )


@dataclass(frozen=True)
class _Message:
    """The message of one rank: its labels as int64 bits, then its statistics, in one tensor."""

    packed: Tensor
    labels: Tensor
    stats: Tensor
    offset: int

    @staticmethod
    def of(rows: Rows, labels: Tensor, cosines: Tensor | None) -> "_Message":
        count, kinds = len(labels), 3 if cosines is None else 4
        dtype = accumulates_in(rows.x.dtype)
        offset = labels.numel() * labels.itemsize // dtype.itemsize
        width = offset + kinds * count
        packed = rows.x.new_empty(
            width + width % 2, dtype=dtype
        )  # even, so that int64 rows stay aligned
        stats = packed[offset:width].view(kinds, count)
        packed[:offset].view(torch.int64).copy_(labels.reshape(-1))
        statistics(rows, stats)
        if cosines is not None:
            stats[3] = cosines
        return _Message(packed, labels, stats, offset)

    def opened(self, of_ranks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels [size, rows, ids] and statistics [size, 3 or 4, rows] of all ranks."""
        end = self.offset + self.stats.numel()
        labels = of_ranks[:, : self.offset].view(torch.int64).unflatten(1, self.labels.shape)
        return labels, of_ranks[:, self.offset : end].unflatten(1, self.stats.shape)

    def by_row(self, of_ranks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same with the rows last, on the host."""
        labels, parts = self.opened(of_ranks.cpu())
        return labels.movedim(1, 2), parts


def shards_of(
    ring: CommContext,
    collective: str,
    rows: Tensor,
    ids: int,
    options: Sequence[tuple[str, int | float]],
    ignore_index: int | None = None,
) -> Shards:
    """Return the shards of all ranks; raises on every rank if their calls differ.

    ``rows``: [rows, classes]; classes may differ. One exchange between the hosts, nothing launched.
    """
    facts = [
        Fact("rows of logits", rows.shape[0], ShapeError),
        Fact("the dtype of logits", rows.dtype, DtypeError),
        Fact("ids per row of label", ids, ShapeError),
        *(Fact(name, value) for name, value in options),
    ]
    sizes = [classes for (classes,) in check_ranks_agree(ring, collective, facts, [rows.shape[1]])]
    return Shards(ring, collective, sum(sizes[: ring.rank]), sum(sizes), ignore_index)
