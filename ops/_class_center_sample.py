"""class_center_sample: the classes that a batch of labels trains, and its labels in their order."""

import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate

import torch

from commlib._checks import check_tensor
from commlib._context import CommContext
from commlib._manager import comm
from commlib.errors import ArgumentError, CommError, DtypeError, ShapeError
from commlib.ops import _permutation
from commlib.ops._class_batch import SEEDS, batch_of, has_kernels, length_of
from commlib.ops._library import like, register, traced

Tensor = torch.Tensor

VERB = "class_center_sample"
CODE = zlib.crc32(VERB.encode())
LABELS = (torch.int32, torch.int64)


def class_center_sample(
    label: Tensor,
    num_classes: int,
    num_samples: int,
    ring_id: int = 0,
    *,
    seed: int | None = None,
    padded: bool = False,
    use_calc_stream: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return (remapped label, sampled class centres) of a batch over classes in shards.

    ``label``: [N], int32 or int64 ids of the whole class axis, the same on every rank; N above 0.
    ``num_classes``: this rank's classes, 1 to 2**31 - 1, in rank order; it may differ between
    ranks. Rank q samples n_q = max(num_samples, its distinct labels) of its classes: those of the
    batch ascending, then others drawn without replacement, each equally likely.
    The second result is [n_r], ids counted from the rank's first class; the first is [N], each
    label's place in the samples of rank 0, 1, …: the same on every rank. Both have label's dtype.
    ``seed`` plus the rank, 0 to 2**62, decides on the draw, alike on CPUs and GPUs; None draws one
    from torch's generator of the device.
    ``padded``: the second result is [max(num_samples, min(N, num_classes))] with -1 behind n_r,
    and the host waits for no GPU, so that a CUDA graph can hold the call (a replay draws anew);
    labels are then not checked: one that is no class becomes -1 and is no positive.
    No gradient. Everything runs on the current stream, nothing is sent between devices, hence
    ``use_calc_stream`` changes nothing; one exchange between the hosts, and without ``padded`` a
    GPU call waits for its labels. Raises on every rank ``ShapeError`` for an empty label or
    another N, ``ArgumentError`` for numbers or labels out of range, or labels that differ between
    ranks; ``DtypeError``, ``DeviceError``, ``RingError``.
    Source: operator ``class_center_sample``, the intended rule of its counts.
    """
    call: Callable[..., tuple[Tensor, Tensor, Tensor]] = _run
    if traced(VERB, use_calc_stream, True):
        call = _twin
    how = seed, not padded, use_calc_stream
    remapped, sampled, kept = call(label, num_classes, num_samples, ring_id, *how)
    if padded or len(sampled) == num_samples:  # nothing to cut, nothing to wait for
        return remapped, sampled
    cut: Callable[..., Tensor] = _cut_twin if call is _twin else _cut
    return remapped, cut(sampled, kept)


def _run(
    label: Tensor,
    num_classes: int,
    num_samples: int,
    ring_id: int,
    seed: int | None,
    checked: bool,
    use_calc_stream: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the remapped labels, the sample with -1 behind it, and [1]: how many are sampled."""
    context = comm(ring_id)
    try:
        _check(context, label, num_classes, num_samples, seed, checked)
    except ArgumentError:
        with suppress(CommError):  # the other ranks are told; what is wrong here counts more
            context.exchange([CODE])
        raise
    batch = batch_of(label)
    mine = [CODE, label.numel(), num_classes, num_samples]
    facts = batch.facts() if checked and len(label) else []
    bounds = _agreed(context, context.exchange([*mine, *facts]))
    return batch.sampled(bounds, context.rank, num_samples, seed)


def _cut(sampled: Tensor, kept: Tensor) -> Tensor:
    """Return what is sampled, without the rest; waits for a GPU."""
    return sampled[: int(kept)]


# -- what the ranks must agree on ----------------------------------------------------------------


def _check(
    context: CommContext,
    label: Tensor,
    num_classes: object,
    num_samples: object,
    seed: object,
    checked: bool,
) -> None:
    """Refuse what can't even be told to the other ranks, or to none but this one."""
    check_tensor(context, VERB, "label", label)
    where = context.where(VERB)
    if label.dtype not in LABELS:
        raise DtypeError(
            f"{where}: label is {label.dtype}; expected int32 or int64; type label.long()"
        )
    if label.dim() != 1:
        raise ShapeError(
            f"{where}: label has shape {tuple(label.shape)}; expected [N]; type label.flatten()"
        )
    for name, value in (("num_classes", num_classes), ("num_samples", num_samples)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentError(f"{where}: {name}={value!r}; expected an int")
        if abs(value) > _permutation.LARGEST:
            raise ArgumentError(f"{where}: {name}={value}; expected at most 2**31 - 1")
    if seed is not None and (
        isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= SEEDS
    ):
        raise ArgumentError(f"{where}: seed={seed!r}; expected an int from 0 to 2**62, or None")
    if not label.is_cuda or not torch.cuda.is_current_stream_capturing():
        return
    if checked:
        raise ArgumentError(
            f"{where}: a CUDA graph can't hold a result whose size depends on the labels; "
            f"type padded=True"
        )
    if not has_kernels():
        raise ArgumentError(f"{where}: a CUDA graph needs Triton; type pip install triton")


def _agreed(context: CommContext, every: Sequence[Sequence[int]]) -> list[int]:
    """Return the first class of each rank, and their total behind it; raises on every rank.

    A row is the operator, and then N, classes, samples, and without ``padded`` digest, least and
    greatest label; nothing behind the operator where a rank's own arguments are refused.
    """
    where = context.where(VERB)
    strangers = [rank for rank, row in enumerate(every) if row[:1] != [CODE]]
    if strangers:
        raise ArgumentError(
            f"{where}: ranks {strangers} of the ring are in another operator; every rank must "
            f"call the same operators in the same order"
        )
    refused = [rank for rank, row in enumerate(every) if len(row) == 1]
    if refused:
        raise ArgumentError(f"{where}: the arguments of ranks {refused} are refused there")
    for rank, (_, count, classes, samples, *_) in enumerate(every):
        if not count:
            raise ShapeError(f"{where}: label is empty on rank {rank}; expected 1 or more ids")
        if classes <= 0:
            raise ArgumentError(f"{where}: num_classes={classes} on rank {rank}; expected above 0")
        if not 0 < samples <= classes:
            raise ArgumentError(
                f"{where}: num_samples={samples} on rank {rank}; expected 1 to its "
                f"num_classes={classes}"
            )
    _same(where, "N", [row[1] for row in every], ShapeError)
    _same(where, "num_samples", [row[3] for row in every], ArgumentError)
    bounds = [0, *accumulate(row[2] for row in every)]
    _agreed_labels(where, {rank: row[4:] for rank, row in enumerate(every) if row[4:]}, bounds[-1])
    return bounds


def _agreed_labels(where: str, told: dict[int, Sequence[int]], total: int) -> None:
    for rank, (_, *ends) in told.items():
        outside = [label for label in ends if not 0 <= label < total]
        if outside:
            raise ArgumentError(
                f"{where}: label {outside[0]} on rank {rank} is outside the {total} classes; "
                f"expected 0 to {total - 1}"
            )
    digests = {rank: tuple(facts) for rank, facts in told.items()}
    if len(set(digests.values())) > 1:
        first = next(iter(digests))
        others = [rank for rank, facts in digests.items() if facts != digests[first]]
        raise ArgumentError(
            f"{where}: label of ranks {others} differs from that of rank {first}; give each rank "
            f"the labels of the whole batch: ops.all_gather(label)"
        )


def _same(where: str, what: str, values: list[int], error: type[ArgumentError]) -> None:
    if len(set(values)) > 1:
        raise error(f"{where}: {what} of rank 0, 1, …: {values}; expected the same on every rank")


# -- registered ----------------------------------------------------------------------------------


def _fake(
    label: Tensor, num_classes: int, num_samples: int, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    sampled = label.new_empty(length_of(label, num_classes, num_samples))
    return like(label), sampled, label.new_empty(1, dtype=torch.int64)


def _cut_copy(sampled: Tensor, kept: Tensor) -> Tensor:
    return _cut(sampled, kept).clone()


def _cut_fake(sampled: Tensor, kept: Tensor) -> Tensor:
    return sampled.new_empty(torch.library.get_ctx().new_dynamic_size())


# Two: code generation fails on a size that depends on data in a later result of an ordered one.
_twin = register(
    f"{VERB}(Tensor label, SymInt num_classes, SymInt num_samples, int ring_id, SymInt? seed,"
    f" bool checked, bool use_calc_stream) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
_cut_twin = register(
    f"{VERB}_cut(Tensor sampled, Tensor kept) -> Tensor", _cut_copy, _cut_fake, ordered=False
)
