"""ops.class_center_sample: the classes of a batch and others, and the labels in their order."""

import gc
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import commlib
from commlib import graph, ops
from commlib.errors import ArgumentError, DeviceError, DtypeError, RingError, ShapeError
from commlib.ops.classification.label_batch import Batch
from commlib.ops.classification.permutation import permuted
from tests.support.checks import Array, assert_bits_equal, assert_equal, laid_out, raises, rounded
from tests.support.examples import examples
from tests.support.operator import ABSENT_RING, calls, compile_whole, generating, well_registered
from tests.support.ranks import Ranks, fresh
from tests.support.runs_on import runs_on

CPU = torch.device("cpu")
KINDS = (torch.int32, torch.int64)
sample_of = ops.class_center_sample


def positives(label: Array, sizes: Sequence[int]) -> list[Array]:
    """Return each rank's classes of the batch, ascending, counted from its first class."""
    edges = np.cumsum([0, *sizes])
    shards = [label[(label >= a) & (label < b)] for a, b in pairwise(edges)]
    return [np.unique(shard) - first for shard, first in zip(shards, edges, strict=False)]


def expected(label: Array, sizes: Sequence[int], samples: int) -> tuple[Array, list[Array]]:
    """Return the remapped labels, -1 for other numbers, and each rank's classes of the batch."""
    of_rank = positives(label, sizes)
    remap: dict[int, int] = {}
    begin = first = 0
    for classes, size in zip(of_rank, sizes, strict=True):
        remap |= {first + int(c): begin + i for i, c in enumerate(classes)}
        begin, first = begin + max(samples, len(classes)), first + size
    return np.array([remap.get(int(one), -1) for one in label]), of_rank


def labels(count: int, total: int, kind: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return ids of the whole class axis, the same on every rank."""
    return rounded(np.random.default_rng([seed, count, total]).integers(0, total, count), kind)


def check(
    comm: Any, label: torch.Tensor, sizes: Sequence[int], samples: int, **how: Any
) -> torch.Tensor:
    """Compare one call with the reference; return its sample without padding."""
    sizes = [sizes[rank % len(sizes)] for rank in range(comm.size)]
    want, of_rank = expected(label.cpu().numpy(), sizes, samples)
    classes, size = of_rank[comm.rank], sizes[comm.rank]
    remapped, sampled = sample_of(label, size, samples, comm.ring_id, **how)
    case = f"{label.dtype} {sizes} {samples} {how}"
    assert_bits_equal(remapped, want, f"remapped {case}")
    assert_equal((sampled.dtype, sampled.device), (label.dtype, label.device), case)
    count = max(samples, len(classes))
    if how.get("padded"):
        assert_equal(len(sampled), max(samples, min(len(label), size)), f"padded length {case}")
        assert_equal(set(sampled[count:].tolist()) <= {-1}, True, f"padding {case}")
        sampled = sampled[:count]
    chosen = sampled.tolist()
    assert_equal(len(chosen), count, f"count {case}")
    assert_equal(chosen[: len(classes)], classes.tolist(), f"classes of the batch {case}")
    assert_equal(len(set(chosen)), count, f"distinct {case}")
    assert_equal(min(chosen) >= 0 and max(chosen) < size, True, f"range {case}")
    return sampled


CASES = [  # classes of each rank in turn, samples, labels
    ([20], 6, 10),
    ([10], 6, 20),
    ([1], 1, 1),
    ([7, 12, 9], 7, 40),
    ([5, 64, 33], 1, 3),
    ([2, 1, 5], 1, 9),
    ([3000, 2500], 700, 1025),
]


def values(comm: Any, cases: list[tuple[list[int], int, int]]) -> None:
    """Both dtypes, even and uneven shards, few and many labels; a seed fixes the draw."""
    for sizes, samples, count in cases:
        total = sum(sizes[rank % len(sizes)] for rank in range(comm.size))
        for kind in KINDS:
            label = labels(count, total, kind).to(comm.device)
            first = check(comm, label, sizes, samples, seed=3)
            for mode in ({"padded": True}, {"use_calc_stream": False}):
                assert_bits_equal(check(comm, label, sizes, samples, seed=3, **mode), first, mode)
            check(comm, label, sizes, samples)
            check(comm, label, sizes, samples, padded=True)
            stepped = laid_out(label, "stepped", comm.device)
            assert_bits_equal(check(comm, stepped, sizes, samples, seed=3), first, "strided label")
            same_class = label[:1].expand(len(label))
            check(comm, same_class, sizes, samples, seed=2**62)


def test_values(ranks: Ranks) -> None:
    ranks(values, [*CASES, ([50_000], 20_000, 2500)])


def test_three_ranks(three_ranks: Ranks) -> None:
    three_ranks(values, CASES)


def test_four_ranks() -> None:
    with fresh(4) as ranks:
        ranks(values, CASES[3:5])


@runs_on("ranks")
def test_one_rank(comm: Any) -> None:
    """The check vector of the legacy operator, on one rank."""
    ring = commlib.new_ring(50 + comm.rank, [comm.rank])
    assert ring is not None
    for kind in KINDS:
        label = torch.tensor([17, 10, 5, 18, 8, 8, 19, 14, 10, 14], dtype=kind).to(comm.device)
        remapped, sampled = sample_of(label, 20, 6, ring.ring_id)
        assert_equal(remapped.tolist(), [4, 2, 0, 5, 1, 1, 6, 3, 2, 3], "remapped")
        assert_equal(sampled.tolist(), [5, 8, 10, 14, 17, 18, 19], "sampled")
        check(ring, label, [20], 12)
    with raises(ArgumentError, "label 20 on rank 0", "the 20 classes"):
        sample_of(label + 1, 20, 6, ring.ring_id)


@runs_on("ranks")
def test_counts_of_each_rank(comm: Any) -> None:
    """Each rank's count is its own: 2 and 9 classes of the batch with 6 samples give 6 and 9."""
    label = torch.tensor([3, 1, *range(20, 29)], device=comm.device)
    remapped, sampled = sample_of(label, 20, 6)
    assert_equal(len(sampled), (6, 9)[comm.rank], "count")
    assert_equal(remapped.tolist(), [1, 0, *range(6, 15)], "remapped")


@runs_on("ranks")
def test_negated_labels(comm: Any) -> None:
    """Labels that are negated where they are read count with their values."""
    label = labels(10, 40, torch.int64).to(comm.device)
    negated = torch._neg_view(-label)
    for mode in ({}, {"padded": True}):
        results = (sample_of(one, 20, 6, seed=3, **mode) for one in (negated, label))
        for actual, want in zip(*results, strict=True):
            assert_bits_equal(actual, want, mode)


@runs_on("three_ranks")
def test_another_ring(comm: Any) -> None:
    """The ring that is asked counts, its ranks in any order: not ring 0."""
    ring = commlib.new_ring(60, [2, 0])
    if ring is None:
        return
    label = torch.tensor([0, 3, 11, 3])
    check(ring, label, [4, 8], 3)
    remapped, sampled = sample_of(label, (4, 8)[ring.rank], 3, 60)
    assert_equal(remapped.tolist(), [0, 1, 3, 1], "remapped")
    assert_equal(
        sampled[: 2 - ring.rank].tolist(), ([0, 3], [7])[ring.rank], "classes of the batch"
    )


@runs_on("ranks")
def test_no_class_with_padding(comm: Any) -> None:
    """With padding a label that is not a class is -1, and no positive."""
    label = torch.tensor([-1, 5, 99, 2, 5, -(2**40), 12, 2**40], device=comm.device)
    check(comm, label, [8, 7], 4, padded=True)


# -- the draw ------------------------------------------------------------------------------------


@runs_on("ranks")
def test_seeds(comm: Any) -> None:
    """The generator or a seed decides; each rank draws for itself; a CPU draws alike."""
    label = torch.arange(0, 2000, 100, device=comm.device)

    def draw(seed: int | None = None) -> list[int]:
        drawn: list[int] = sample_of(label, 1000, 300, seed=seed)[1].tolist()
        return drawn

    torch.manual_seed(5)
    first, second = draw(), draw()
    torch.manual_seed(5)
    assert_equal([draw(), draw()], [first, second], "the generator's seed again")
    assert_equal(first == second, False, "another draw")
    assert_equal(draw(0) == draw(1), False, "another seed")
    on_cpu = Batch(label.cpu()).sampled([0, 1000, 2000], comm.rank, 300, 8)[1]
    assert_equal(draw(8), on_cpu.tolist(), "a seed on a CPU")
    # Seed 7 of rank 1 is seed 8 of rank 0: alike where their classes of the batch are.
    every = ops.all_gather(torch.tensor(draw(8 - comm.rank), device=comm.device)).view(2, -1)
    assert_bits_equal(every[0], every[1], "seed plus rank")


@examples(60)
@given(
    size=st.integers(1, 400) | st.sampled_from([2**16, 2**20 + 7, 2**31 - 1]),
    seed=st.integers(0, 2**63 - 1),
    data=st.data(),
)
def test_images_are_distinct(size: int, seed: int, data: Any) -> None:
    count = data.draw(st.integers(0, min(size, 500)))

    images = permuted(seed, count, size, CPU)

    assert len(images.unique()) == count
    assert all(0 <= image < size for image in images.tolist())
    assert sorted(permuted(seed, min(size, 500), size, CPU).tolist()[:count]) == sorted(
        images.tolist()
    )


@pytest.mark.parametrize(
    ("seed", "size", "images"),
    [
        (0, 6, [5, 1, 2, 3, 0, 4]),
        (7, 1000, [159, 380, 279, 514, 726, 636]),
        (2**62 + 1, 2**31 - 1, [132944047, 616127463, 1228263427, 1080927216, 192078989]),
        (4884, 2**31 - 1, [78767279, 140257891, 1971168886]),  # a key and a half pass 2**32
    ],
)
def test_a_seed_draws_the_same_in_every_version(seed: int, size: int, images: list[int]) -> None:
    assert permuted(seed, len(images), size, CPU).tolist() == images


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10, 13])  # 7, 10: walks of two steps
def test_a_whole_draw_is_every_class(size: int) -> None:
    for seed in range(40):
        assert sorted(permuted(seed, size, size, CPU).tolist()) == list(range(size))


def test_the_largest_size_uses_all_of_it() -> None:
    images = permuted(11, 4000, 2**31 - 1, CPU)

    middles = np.histogram(images.numpy(), bins=8, range=(0, 2**31 - 1))[0]
    assert middles.min() > 400 and middles.max() < 600


def chi_square(found: Counter[Any], cells: Sequence[Any]) -> float:
    """Return how many deviations the cells are from equal frequencies."""
    mean = found.total() / len(cells)
    square = sum((found[cell] - mean) ** 2 / mean for cell in cells)
    return float((square - len(cells) + 1) / (2 * (len(cells) - 1)) ** 0.5)


@pytest.mark.parametrize("size", [2, 5, 6])
def test_every_pair_is_as_likely(size: int) -> None:
    drawn = [permuted(seed, 2, size, CPU).tolist() for seed in range(2000)]

    counts = Counter(map(tuple, drawn))

    assert abs(chi_square(counts, list(permutations(range(size), 2)))) < 4


def test_every_class_is_as_likely() -> None:
    size, count = 900, 90
    drawn = np.concatenate([permuted(seed, count, size, CPU).numpy() for seed in range(1000)])
    counts = Counter(drawn.tolist())

    # A seed draws no class twice, which makes the frequencies a tenth more even.
    assert abs(chi_square(counts, range(size)) + 0.1 * (size / 2) ** 0.5) < 4


def test_pairs_of_many_classes_are_as_likely() -> None:
    """How often neighbours come together: as often as any two."""
    size, count, seeds_ = 400, 40, 1500
    chosen = np.zeros((seeds_, size))
    for seed in range(seeds_):
        chosen[seed, permuted(seed, count, size, CPU).numpy()] = 1
    together = chosen.T @ chosen / seeds_
    wanted = count * (count - 1) / (size * (size - 1))
    deviation = (wanted / seeds_) ** 0.5
    for step in (1, 2, 20, 21):  # 20 is the side of the square that numbers of this size fill
        near = (np.diagonal(together, step) - wanted) / deviation
        assert abs(near.mean()) < 4 / len(near) ** 0.5
        assert 0.8 < near.std() < 1.25


# -- compiled ------------------------------------------------------------------------------------


def compiled(comm: Any, backend: str) -> None:
    """One graph, with and without a seed and padding, gives eager's bits; sizes may change."""
    ways: list[dict[str, Any]] = [{}, {"seed": 4}, {"padded": True}, {"padded": True, "seed": 4}]
    if backend == "inductor":
        ways = ways[:3:2]
    arguments = [(kwargs, samples) for samples in (3, 8) for kwargs in ways]

    def body(label: torch.Tensor) -> list[torch.Tensor]:
        pairs = [sample_of(label, 9, samples, **kwargs) for kwargs, samples in arguments]
        return [x * 2 + 1 for pair in pairs for x in pair]

    graph = compile_whole(body, backend=backend)
    for count in (5, 12, 30) if backend == "aot_eager" else (12,):
        for kind in KINDS if backend == "aot_eager" else KINDS[:1]:
            label = labels(count, 9 * comm.size, kind, count).to(comm.device)
            torch.manual_seed(count)
            wants = body(label)
            torch.manual_seed(count)
            for given_, want in zip(graph(label), wants, strict=True):
                assert_bits_equal(given_, want, f"{count} {kind}")


def test_compiled(ranks: Ranks) -> None:
    ranks(compiled, "aot_eager")


def test_compiled_with_generated_code(unified_ranks: Ranks) -> None:
    generating(unified_ranks)(compiled, "inductor", deadline=240)


@runs_on("ranks")
def test_registration(comm: Any) -> None:
    """Run torch's own checks: schema, fake against real, autograd, tracing with any sizes."""
    label = labels(12, 10 * comm.size, torch.int64).to(comm.device)
    operator = torch.ops.commlib.class_center_sample.default
    for checked in (False, True):
        arguments = label, 10, 3, 0, 4, checked, True
        well_registered(operator, arguments)
    cut = torch.ops.commlib.class_center_sample_cut.default
    well_registered(cut, (label, torch.tensor([3])))


# -- any batch -----------------------------------------------------------------------------------


@st.composite
def batch(draw: st.DrawFn) -> tuple[list[int], int, list[int], int]:
    """Classes of two ranks, samples, labels, a seed."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=2, max_size=2))
    label = draw(st.lists(st.integers(0, sum(sizes) - 1), min_size=1, max_size=60))
    return sizes, draw(st.integers(1, min(sizes))), label, draw(st.integers(0, 2**62))


@examples(8)
@given(batches=st.lists(batch(), min_size=8, max_size=8))
@runs_on("ranks")
def test_any_batches(comm: Any, batches: list[tuple[list[int], int, list[int], int]]) -> None:
    for sizes, samples, ids, seed in batches:
        label = torch.tensor(ids, device=comm.device)
        drawn = check(comm, label, sizes, samples, seed=seed)
        assert_bits_equal(
            check(comm, label.int(), sizes, samples, seed=seed, padded=True), drawn.int()
        )
        edges = [0, sizes[0], sum(sizes)]
        expected = Batch(label.cpu()).sampled(edges, comm.rank, samples, seed)[1]
        assert_bits_equal(drawn, expected[: len(drawn)], "as on a CPU")


@runs_on("cpu_ranks")
def test_captured_on_a_cpu(comm: Any) -> None:
    """A captured function makes the call in an eager part, where its labels are read."""

    def padded(label: torch.Tensor) -> Any:
        return sample_of(label, 50, 3, seed=6, padded=True)

    for call in (padded, lambda label: sample_of(label, 50, 3, seed=6)):
        with raises(ArgumentError, "on a CPU", "padded=True", "commlib.graph.eager"):
            graph.capture(call)(labels(30, 100, torch.int64))
    part = graph.eager(padded)
    captured = graph.capture(lambda label: part(label * 1), outputs="copy")
    for seed in range(4):
        label = labels(30, 100, torch.int64, seed)
        for got, want in zip(captured(label), padded(label), strict=True):
            assert_bits_equal(got, want, f"replay {seed}")


# -- on GPUs -------------------------------------------------------------------------------------


@runs_on("all_gpu_ranks", deadline=120)
def test_captured(comm: Any) -> None:
    """A capture, replayed with new labels, equals eager; without a seed each replay draws again."""
    gc.collect()  # a graph of another test that goes in a capture would end it
    for kind in KINDS:
        for sizes, samples in (([700, 900], 60), ([70, 50], 3)):
            label = torch.zeros(300, dtype=kind, device=comm.device)
            size = sizes[comm.rank]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                fixed = sample_of(label, size, samples, seed=6, padded=True)
                drawn = sample_of(label, size, samples, padded=True)
                with raises(ArgumentError, "pass padded=True"):
                    sample_of(label, size, samples)
            for seed in range(3):
                label.copy_(labels(300, sum(sizes), kind, seed))
                torch.manual_seed(seed)
                graph.replay()
                want = sample_of(label, size, samples, seed=6, padded=True)
                for got, wanted in zip(fixed, want, strict=True):
                    assert_bits_equal(got, wanted, f"{kind} {sizes} seed")
                assert_bits_equal(drawn[0], want[0], "remapped without a seed")
                first = drawn[1].clone()
                torch.manual_seed(seed)
                assert_bits_equal(
                    sample_of(label, size, samples, padded=True)[1], first, "the generator"
                )
                graph.replay()
                if int((first >= 0).sum()) == samples and samples > 3:
                    assert_equal(torch.equal(first, drawn[1]), False, "a replay draws again")


@pytest.mark.two_gpus
@runs_on("all_gpu_ranks")
def test_another_current_device(comm: Any) -> None:
    """The ring's GPU need not be the current one."""
    label = labels(50, 200, torch.int64).to(comm.device)
    want = sample_of(label, 100, 30, seed=1)
    with torch.cuda.device(1 - comm.device.index):
        for got, wanted in zip(sample_of(label, 100, 30, seed=1), want, strict=True):
            assert_bits_equal(got, wanted)


# -- bad input -----------------------------------------------------------------------------------


@runs_on("ranks")
def test_wrong_on_one_rank(comm: Any) -> None:
    """What is wrong on one rank, or differs, is an error on every rank that names who is wrong."""
    label = labels(6, 20, torch.int64).to(comm.device)
    odd = comm.rank == 1
    for classes in (0, -3, 1):
        name = "num_classes" if classes < 1 else "num_samples"
        with raises(ArgumentError, name if odd else "invalid arguments on ranks [1]"):
            sample_of(label, classes if odd else 10, 2)
    with raises(ArgumentError, "num_samples: 2 on ranks [0], 3 on ranks [1]"):
        sample_of(label, 10, 2 + odd)
    with raises(ShapeError, "N: 6 on ranks [0], 5 on ranks [1]"):
        sample_of(label[: 6 - odd], 10, 2)
    for value in (-1, 20, 2**40, -(2**63)):
        wrong = label.clone()
        wrong[3 * odd] = value if odd else wrong[0]
        for call in (sample_of, compile_whole(sample_of)):
            with raises(ArgumentError, f"label {value} on rank 1", "20 classes", "0 to 19"):
                call(wrong, 10, 2)
    swapped = label.clone()
    swapped[0], swapped[1] = (0, 19) if odd else (19, 0)  # the same labels in another order
    with raises(ArgumentError, "label of ranks [1] differs from that of rank 0", "all_gather"):
        sample_of(swapped, 10, 2)
    for refused_there in (label.float(), label.view(2, 3), label[:0], label.to("meta"), [1, 2]):
        with raises(ArgumentError, "label" if odd else "invalid arguments on ranks [1]"):
            sample_of(refused_there if odd else label, 10, 2)
    x = torch.zeros(6, 10, device=comm.device)
    with raises(ArgumentError, f"ranks [{1 - comm.rank}]", "another operator"):
        ops.softmax_with_cross_entropy(x, label) if odd else sample_of(label, 10, 2)
    check(comm, label, [10], 2)


@runs_on("three_ranks")
def test_wrong_on_one_of_three(comm: Any) -> None:
    label = labels(6, 30, torch.int32)
    label[5] = 7 if comm.rank == 2 else 8
    with raises(ArgumentError, "ranks [2] differs from that of rank 0"):
        sample_of(label, 10, 2)


@runs_on("ranks")
def test_refusals(comm: Any) -> None:
    """A wrong call is one of our errors with what to type; nothing is launched."""
    label = labels(6, 20, torch.int64).to(comm.device)
    before = calls(comm)
    state = torch.get_rng_state()
    with raises(RingError, ABSENT_RING):
        sample_of(label, 10, 2, ABSENT_RING)
    with raises(DtypeError, "float32", "label.long()"):
        sample_of(label.float(), 10, 2)
    for wrong in (label.view(2, 3), label[0]):
        with raises(ShapeError, tuple(wrong.shape), "label.flatten()"):
            sample_of(wrong, 10, 2)
    with raises(DeviceError, "meta", comm.device):
        sample_of(label.to("meta"), 10, 2)
    with raises(ArgumentError, "label is list"):
        sample_of([1, 2], 10, 2)
    for number in (True, 2.0, None, "2"):
        with raises(ArgumentError, f"num_classes={number!r}"):
            sample_of(label, number, 2)
        with raises(ArgumentError, f"num_samples={number!r}"):
            sample_of(label, 10, number)
    with raises(ArgumentError, "num_classes=2147483648", "2**31 - 1"):
        sample_of(label, 2**31, 2)
    for seed in (-1, 2**62 + 1, 0.5, True, "1"):
        with raises(ArgumentError, f"seed={seed!r}"):
            sample_of(label, 10, 2, seed=seed)
    for classes in (0, -3):
        with raises(ArgumentError, f"num_classes={classes}", "from 1 to 2**31 - 1"):
            sample_of(label, classes, 2)
    for samples in (0, -1, 11):
        with raises(ArgumentError, f"num_samples={samples}", "from 1 to num_classes=10"):
            sample_of(label, 10, samples)
    with raises(ShapeError, "label is empty"):
        sample_of(label[:0], 10, 2)
    assert_equal(calls(comm), before, "calls launched by refused ones")
    assert_equal(torch.equal(torch.get_rng_state(), state), True, "the generator is left alone")
