"""class_center_sample: the classes that a batch of labels trains, and its labels in their order."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from commlib.core import observers
from commlib.core.context import CommContext
from commlib.core.manager import comm
from commlib.core.validation import check_tensor
from commlib.errors import ArgumentError, DtypeError, ShapeError
from commlib.ops.agreement import Fact, check_ranks_agree, refuse_together
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.classification import permutation
from commlib.ops.classification.label_batch import SEEDS, batch_of, length_of
from commlib.ops.registered.library import like, register, traced
from commlib.ops.triton_support import has_triton

Tensor = torch.Tensor

NAME = "class_center_sample"
LABELS = (torch.int32, torch.int64)


def class_center_sample(
    label: Tensor,
    num_classes: int,
    num_samples: int,
    ring_id: Ring = 0,
    *,
    seed: int | None = None,
    padded: bool = False,
    use_calc_stream: bool = True,
) -> tuple[Tensor, Tensor]:
    """Sample class centres for a batch of labels over sharded classes.

    Rank q samples n_q = max(num_samples, number of its distinct labels) of its classes: those of
    the batch in ascending order, then others without replacement, each equally likely. There is no
    gradient. Source: operator ``class_center_sample``, the intended rule of its counts.

    Args:
        label: [N], N above 0, int32 or int64 ids of the whole class axis, the same on every rank.
        num_classes: This rank's classes, 1 to 2**31 - 1, in rank order; may differ between ranks.
        num_samples: Least number of classes to sample on each rank.
        ring_id: The ring, its id or its name.
        seed: 0 to 2**62. Seed and rank decide the draw, alike on CPUs and GPUs. Default: a draw
            from torch's generator of the device.
        padded: Pad the samples with -1 to [max(num_samples, min(N, num_classes))], without waiting
            for the GPU, so that a CUDA graph can hold the call; each replay draws again. Labels
            are then not checked: a label outside the classes becomes -1 and is not sampled. On a
            CPU a captured function makes the call in a part that ``graph.eager`` marks.
        use_calc_stream: No effect: nothing is sent between devices, and everything runs on the
            current stream.

    Returns:
        (remapped label, sampled classes), both of label's dtype. The first is [N], the index of
        each label in the samples of rank 0, 1, …: the same on every rank. The second is [n_r], ids
        counted from this rank's first class. The hosts exchange facts once; without ``padded`` a
        GPU call waits for its labels.

    Raises:
        RingError: The ring does not exist, or it has failed.
        ShapeError: ``label`` is empty, or N differs between ranks.
        ArgumentError: A number or label is out of range, labels differ between ranks, or the
            arguments of another rank are invalid.
        DtypeError, DeviceError: ``label`` has another dtype or device.
    """
    ring_id = ring_number("class_center_sample", ring_id)
    if torch.compiler.is_compiling():
        by_op = traced(NAME, use_calc_stream, True)
    else:
        with refuse_together(comm(ring_id), NAME):
            by_op = traced(NAME, use_calc_stream, True, ring_id, label=label)
    call: Callable[..., tuple[Tensor, Tensor, Tensor]] = _registered_op if by_op else _run
    options = seed, not padded, use_calc_stream
    remapped, sampled, count = call(label, num_classes, num_samples, ring_id, *options)
    if padded or len(sampled) == num_samples:  # nothing to cut, nothing to wait for
        return remapped, sampled
    cut: Callable[..., Tensor] = _cut_op if call is _registered_op else _cut
    return remapped, cut(sampled, count)


def _run(
    label: Tensor,
    num_classes: int,
    num_samples: int,
    ring_id: int,
    seed: int | None,
    checked: bool,
    use_calc_stream: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the remapped labels, the sample padded with -1, and its size [1]."""
    ring = comm(ring_id)
    with refuse_together(ring, NAME):
        _check(ring, label, num_classes, num_samples, seed, checked)
    batch = batch_of(label)
    facts = [Fact("N", len(label), ShapeError), Fact("num_samples", num_samples)]
    values = [num_classes, *(batch.facts() if checked else [])]
    rows_of_ranks = check_ranks_agree(ring, NAME, facts, values)
    bounds = [0, *accumulate(row[0] for row in rows_of_ranks)]
    _compare(ring, {rank: row[1:] for rank, row in enumerate(rows_of_ranks) if row[1:]}, bounds[-1])
    return batch.sampled(bounds, ring.rank, num_samples, seed)


def _cut(sampled: Tensor, count: Tensor) -> Tensor:
    """Return the sample without its padding; waits for a GPU."""
    return sampled[: int(count)]


def _check(
    ring: CommContext,
    label: Tensor,
    num_classes: object,
    num_samples: object,
    seed: object,
    checked: bool,
) -> None:
    """Check this rank's arguments."""
    check_tensor(ring, NAME, "label", label)
    prefix = ring._describe(NAME)
    if label.dtype not in LABELS:
        raise DtypeError(
            f"{prefix}: label is {label.dtype}; expected int32 or int64; pass label.long()"
        )
    if label.dim() != 1:
        raise ShapeError(
            f"{prefix}: label has shape {tuple(label.shape)}; expected [N]; pass label.flatten()"
        )
    if not len(label):
        raise ShapeError(f"{prefix}: label is empty; expected 1 or more ids")
    most = permutation.LARGEST
    for name, value in (("num_classes", num_classes), ("num_samples", num_samples)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            limit = "2**31 - 1" if name == "num_classes" else f"num_classes={most}"
            raise ArgumentError(f"{prefix}: {name}={value!r}; expected an int from 1 to {limit}")
        most = value
    if seed is not None and (
        isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= SEEDS
    ):
        raise ArgumentError(f"{prefix}: seed={seed!r}; expected an int from 0 to 2**62, or None")
    if not label.is_cuda and observers.captured():
        raise ArgumentError(
            f"{prefix}: a capture on a CPU can't hold this call, which reads the labels; call it "
            f"with padded=True in a function that commlib.graph.eager has marked"
        )
    if not label.is_cuda or not torch.cuda.is_current_stream_capturing():
        return
    if checked:
        raise ArgumentError(
            f"{prefix}: a CUDA graph can't hold a result whose size depends on the labels; "
            f"pass padded=True"
        )
    if not has_triton():
        raise ArgumentError(f"{prefix}: a CUDA graph needs Triton; run pip install triton")


def _compare(ring: CommContext, labels: dict[int, Sequence[int]], total: int) -> None:
    """Raise for labels outside the classes, and for batches that differ between ranks.

    ``labels``: digest, least and greatest label of each rank that has checked its labels.
    """
    prefix = ring._describe(NAME)
    for rank, (_, *ends) in labels.items():
        outside = [label for label in ends if not 0 <= label < total]
        if outside:
            raise ArgumentError(
                f"{prefix}: label {outside[0]} on rank {rank} is outside the {total} classes; "
                f"expected 0 to {total - 1}"
            )
    digests = {rank: tuple(facts) for rank, facts in labels.items()}
    if len(set(digests.values())) > 1:
        first = next(iter(digests))
        others = [rank for rank, facts in digests.items() if facts != digests[first]]
        raise ArgumentError(
            f"{prefix}: label of ranks {others} differs from that of rank {first}; pass on each "
            f"rank the labels of the whole batch: ops.all_gather(label)"
        )


# -- registered ----------------------------------------------------------------------------------


def _fake(
    label: Tensor, num_classes: int, num_samples: int, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    sampled = label.new_empty(length_of(label, num_classes, num_samples))
    return like(label), sampled, label.new_empty(1, dtype=torch.int64)


def _cut_copy(sampled: Tensor, count: Tensor) -> Tensor:
    return _cut(sampled, count).clone()


def _cut_fake(sampled: Tensor, count: Tensor) -> Tensor:
    return sampled.new_empty(torch.library.get_ctx().new_dynamic_size())


# Two: code generation fails on a size that depends on data in a later result of an ordered one.
_registered_op = register(
    f"{NAME}(Tensor label, SymInt num_classes, SymInt num_samples, int ring_id, SymInt? seed,"
    f" bool checked, bool use_calc_stream) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
_cut_op = register(
    f"{NAME}_cut(Tensor sampled, Tensor count) -> Tensor", _cut_copy, _cut_fake, ordered=False
)
