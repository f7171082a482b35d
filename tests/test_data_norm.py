"""ops.data_norm: both legacy kernels, their summaries, and who updates these when."""

import copy
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import commlib
from commlib import ops
from commlib.errors import ArgumentError, CommError
from tests.support.checks import Array, assert_bits_equal, assert_equal, raises, sample, wide
from tests.support.examples import examples
from tests.support.operator import calls, well_registered
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

# Any: the tests also pass arguments that a type checker rejects.
data_norm: Any = ops.data_norm

Tensors = list[torch.Tensor]

DTYPES = {torch.float64: 1e-12, torch.float32: 2e-5}
EPSILON = 1e-4
# What the kernels know: behaviour, columns a group, scale and shift.
KINDS = [("gpu", -1, False), ("cpu", -1, False), ("cpu", -1, True)]
KINDS += [
    ("cpu", 2, False),
    ("cpu", 2, True),
    ("cpu", 3, True),
    ("cpu", 1, False),
    ("cpu", 6, True),
]


def shown(x: Array, slot_dim: int) -> Array:
    """Return which values belong to a group that shows something, one row and group at a time."""
    mask = np.ones(x.shape, dtype=bool)
    if slot_dim > 0:
        for row in range(x.shape[0]):
            for first in range(0, x.shape[1], slot_dim):
                mask[row, first : first + slot_dim] = not -1e-7 < x[row, first] < 1e-7
    return mask


def formula(x: Array, columns: list[Array], slot_dim: int, shifts: bool) -> tuple[Array, ...]:
    """Return y, means and scales."""
    size, total, square, scale_w, bias = columns
    means, scales = total / size, np.sqrt(size / square)
    y = (x - means) * scales
    if shifts:
        y = y * scale_w + bias
    return np.where(shown(x, slot_dim), y, 0), means, scales


def derivatives(
    dy: Array, x: Array, columns: list[Array], slot_dim: int, shifts: bool
) -> tuple[Array, ...]:
    """Return the gradients by x and, with scale and shift, by scale_w and bias."""
    size, total, square, scale_w, _ = columns
    means, scales = total / size, np.sqrt(size / square)
    if not shifts:
        return (dy * scales,)
    dy = np.where(shown(x, slot_dim), dy, 0)
    return dy * scales * scale_w, ((x - means) * scales * dy).sum(0), dy.sum(0)


def summary(x: Array, means: Array, behaviour: str, slot_dim: int, epsilon: float) -> Array:
    """Return [3, C]: size, sum and square sum of a batch, one column at a time."""
    mask, batch = shown(x, slot_dim), np.zeros((3, x.shape[1]))
    for column in range(x.shape[1]):
        values = x[mask[:, column], column].astype("f8")
        count, squares = len(values), (values - means[column]) ** 2
        if not count:
            continue
        if behaviour == "gpu":
            batch[:, column] = 1, values.mean(), squares.mean() + epsilon
        elif slot_dim > 0:
            batch[:, column] = 1, values.mean(), squares.mean() + count * epsilon
        else:
            batch[:, column] = count, values.sum(), squares.sum() + count * epsilon
    return batch


def rows(rank: int, shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a batch in which a third of the values shows nothing, some only almost."""
    x = sample(rank, shape, dtype, seed)
    drawn = np.random.default_rng([seed, rank, *shape, 1]).integers(0, 9, shape)
    nothing = torch.tensor([0.0, 9e-8, -9e-8, 2e-7], dtype=dtype)
    at = torch.from_numpy(drawn)
    return torch.where(at < 4, nothing[at.clamp(max=3)], x)


def summaries(width: int, dtype: torch.dtype, seed: int = 0) -> Tensors:
    """Return size, sum, square sum, scale and bias that are not round numbers."""
    values = np.random.default_rng([seed, width]).uniform(0.5, 3.0, (5, width))
    return [torch.from_numpy(row).to(dtype) for row in values * [[9], [2], [7], [1], [1]]]


def keywords(columns: Tensors, kind: tuple[str, int, bool]) -> dict[str, Any]:
    behaviour, slot_dim, shifts = kind
    extra = {"scale_w": columns[3], "bias": columns[4]} if shifts else {}
    return {"behaviour": behaviour, "slot_dim": slot_dim, **extra}


def leaves(comm: Any, *tensors: torch.Tensor) -> Tensors:
    return [tensor.to(comm.device).clone().requires_grad_() for tensor in tensors]


def agrees(comm: Any, x: torch.Tensor, columns: Tensors, kind: Any, decay: float = 0.75) -> None:
    """Results, gradients and summaries are those of the formulas."""
    behaviour, slot_dim, shifts = kind
    label, atol = f"{x.dtype} {tuple(x.shape)} {kind}", DTYPES[x.dtype]
    before = calls(comm)
    leaf, *params = leaves(comm, x, *columns)
    kwargs = {**keywords(params, kind), "epsilon": EPSILON, "summary_decay_rate": decay}
    y, means, scales = data_norm(leaf, *params[:3], return_moments=True, **kwargs)
    wanted = [wide(column) for column in columns]
    want_y, want_means, want_scales = formula(wide(x), wanted, slot_dim, shifts)
    for got, want, name in ((y, want_y, "y"), (means, want_means, "m"), (scales, want_scales, "s")):
        assert_bits_equal(got, want, f"{name} of {label}", atol=atol)
    assert_equal((means.requires_grad, scales.requires_grad), (False, False), label)
    for got, old in zip(params, columns, strict=True):
        assert_bits_equal(got, old, f"after the forward of {label}")
    dy = sample(9, tuple(x.shape), x.dtype)
    y.backward(dy.to(comm.device))
    got_grads = [leaf.grad, params[3].grad, params[4].grad] if shifts else [leaf.grad]
    want_grads = derivatives(wide(dy), wide(x), wanted, slot_dim, shifts)
    for grad, want in zip(got_grads, want_grads, strict=True):
        assert grad is not None
        assert_bits_equal(grad, want, f"gradient of {label}", atol=atol)
    batch = summary(wide(x), want_means, behaviour, slot_dim, EPSILON)
    for got, old, part in zip(params[:3], columns, batch, strict=False):
        if behaviour == "gpu":
            assert_equal(got.grad, None, f"gradient of a summary of {label}")
            assert_bits_equal(got, wide(old) * decay + part, f"summary of {label}", atol=4 * atol)
        else:
            assert_bits_equal(got, old, f"summary of {label}")
            assert got.grad is not None
            assert_bits_equal(got.grad, part, f"summary of {label}", atol=4 * atol)
    with torch.no_grad():
        again = [t.to(comm.device) for t in columns]
        assert_bits_equal(
            data_norm(leaf, *again[:3], **{**kwargs, **keywords(again, kind)}), y, label
        )
    assert_equal(calls(comm) - before, 0, f"collectives of {label}")


@runs_on("ranks")
def test_values(comm: Any) -> None:
    """Every kernel, with few rows, one row and none, and without columns."""
    for dtype in DTYPES:
        for shape in ((7, 6), (1, 6), (0, 6), (3, 0)):
            for kind in KINDS:
                agrees(comm, rows(comm.rank, shape, dtype), summaries(shape[1], dtype), kind)


@runs_on("ranks")
def test_nothing_shown(comm: Any) -> None:
    """A group that no row shows adds nothing to its summaries; the bounds themselves show."""
    x = torch.zeros(3, 4, dtype=torch.float64)
    x[:, 1] = 5.0
    x[1, 2] = 1e-7
    columns = summaries(4, torch.float64)
    for shifts in (False, True):
        agrees(comm, x, columns, ("cpu", 2, shifts))
    leaf, *stats = leaves(comm, x, *columns[:3])
    y = data_norm(leaf, *stats, behaviour="cpu", slot_dim=2)
    y.sum().backward()
    assert_equal((y[:, :2] == 0).all().item(), True, "y where nothing is shown")
    assert_equal(
        [g.grad[:2].tolist() for g in stats if g.grad is not None], [[0.0, 0.0]] * 3, "summaries"
    )
    assert stats[0].grad is not None
    assert_equal(stats[0].grad[2:].tolist(), [1.0, 1.0], "size where one row shows something")


def synchronised(comm: Any) -> None:
    """The batches of all ranks, of any number of rows, are added in one all-reduce."""
    for dtype, atol in DTYPES.items():
        for counts in ([3, 5, 1], [4, 0, 2], [0, 0, 0]):
            for calc in (True, False):
                batches = [rows(r, (counts[r], 4), dtype) for r in range(comm.size)]
                columns = summaries(4, dtype)
                leaf, *stats = leaves(comm, batches[comm.rank])[:1] + [
                    column.to(comm.device).clone() for column in columns[:3]
                ]
                before = calls(comm)
                kwargs = {"sync_stats": True, "use_calc_stream": calc, "summary_decay_rate": 0.5}
                y = data_norm(leaf, *stats, **kwargs)
                launched = calls(comm) - before
                y.sum().backward()
                label = f"{dtype} {counts}"
                assert_equal((launched, calls(comm) - before), (0, 1), f"collectives of {label}")
                wanted = [wide(c) for c in columns]
                means = wanted[1] / wanted[0]
                batch = sum(summary(wide(x), means, "gpu", -1, EPSILON) for x in batches)
                for got, old, part in zip(stats, wanted[:3], np.asarray(batch), strict=True):
                    assert_bits_equal(got, old * 0.5 + part, f"summary of {label}", atol=8 * atol)


def test_synchronised(ranks: Ranks) -> None:
    ranks(synchronised)


def test_synchronised_over_three(three_ranks: Ranks) -> None:
    three_ranks(synchronised)


@runs_on("ranks")
def test_one_rank(comm: Any) -> None:
    """On a ring of one rank nothing is launched, and the batch is the whole."""
    ring = commlib.new_ring(80 + comm.rank, [comm.rank])
    assert ring is not None
    results = []
    for kwargs in ({"sync_stats": True}, {}):
        leaf, *params = leaves(
            comm, *[rows(0, (4, 3), torch.float64), *summaries(3, torch.float64)]
        )
        data_norm(leaf, *params[:3], ring.ring_id, **kwargs).sum().backward()
        results.append([t.detach() for t in params])
    for one, other in zip(*results, strict=True):
        assert_bits_equal(one, other, "alone")


@runs_on("ranks")
def test_when_summaries_are_updated(comm: Any) -> None:
    """Only a backward updates; each does, also two after two forwards, in their own order."""
    x, *columns = (
        t.to(comm.device) for t in (rows(0, (4, 3), torch.float64), *summaries(3, torch.float64))
    )
    kwargs = {"summary_decay_rate": 0.5}

    def state(stats: Tensors) -> list[list[float]]:
        return [t.tolist() for t in stats]

    stats = [c.clone() for c in columns[:3]]
    untouched = state(stats)
    data_norm(x, *stats, **kwargs)
    with torch.no_grad():
        data_norm(x.clone().requires_grad_(), *stats, **kwargs)
    with torch.inference_mode():
        data_norm(x, *stats, **kwargs)
    y = data_norm(x.clone().requires_grad_(), *stats, **kwargs)
    assert_equal(state(stats), untouched, "before any backward")
    y.sum().backward(retain_graph=True)
    once = state(stats)
    assert_equal(once == untouched, False, "a backward updates")
    y.sum().backward()
    means = columns[1] / columns[0]
    part = summary(wide(x), wide(means), "gpu", -1, EPSILON)
    for got, old, add in zip(stats, columns[:3], part, strict=True):
        assert_bits_equal(got, (wide(old) * 0.5 + add) * 0.5 + add, "two backwards", atol=1e-12)
    stats = [c.clone() for c in columns[:3]]
    other = x * 2 + 1
    first = data_norm(x.clone().requires_grad_(), *stats, **kwargs)
    second = data_norm(other.clone().requires_grad_(), *stats, **kwargs)
    second.sum().backward()
    first.sum().backward()
    more = summary(wide(other), wide(means), "gpu", -1, EPSILON)
    for got, old, b, a in zip(stats, columns[:3], more, part, strict=True):
        assert_bits_equal(got, (wide(old) * 0.5 + b) * 0.5 + a, "two forwards first", atol=1e-12)
    only = [c.clone().requires_grad_() for c in columns[:3]]
    data_norm(x, *only, **kwargs).sum().backward()
    assert_equal([s.tolist() for s in only], once, "an x without gradient, summaries with one")
    assert_equal(copy.deepcopy([s.grad for s in only]), [None] * 3, "their gradients")


@runs_on("ranks")
def test_failed_update(comm: Any) -> None:
    """A backward whose all-reduce fails leaves all three summaries as they are."""
    ring = commlib.new_ring(90, list(range(comm.size)))
    assert ring is not None
    leaf, *stats = leaves(comm, rows(0, (4, 3), torch.float32), *summaries(3, torch.float32)[:3])
    y = data_norm(leaf, *stats, 90, sync_stats=True)
    before = [t.tolist() for t in stats]
    commlib.CommContextManager.instance().close(90)
    with raises(CommError, 90):
        y.sum().backward()
    assert_equal([t.tolist() for t in stats], before, "summaries")


@runs_on("ranks")
def test_strided(comm: Any) -> None:
    """Inputs of any strides; summaries that are rows or columns of one buffer are updated there."""
    x, columns = rows(0, (6, 4), torch.float64).to(comm.device), summaries(4, torch.float64)
    want_leaf, *want = leaves(comm, x, *columns[:3])
    want_y = data_norm(want_leaf, *want)
    want_y.sum().backward()
    buffer = torch.stack(columns[:3]).to(comm.device)
    for name, held in (("rows", buffer.clone()), ("columns", buffer.t().contiguous().t())):
        for other in (x.t().contiguous().t(), torch.stack([x, x], 2)[..., 0]):
            state = held.clone(memory_format=torch.preserve_format)
            assert_equal(state.stride(), held.stride(), "strides")
            leaf = other.detach().requires_grad_()
            y = data_norm(leaf, *state.unbind(0))
            y.backward(torch.ones(1, device=comm.device, dtype=y.dtype).expand_as(y))
            assert_bits_equal(y, want_y, f"{name} {other.stride()}")
            assert_bits_equal(leaf.grad, want_leaf.grad, f"gradient, {name} {other.stride()}")
            # Strides decide on the order of a sum.
            assert_bits_equal(state, torch.stack(want).detach(), f"summaries, {name}", atol=1e-12)


@runs_on("ranks")
def test_gradcheck(comm: Any) -> None:
    """Numeric against analytic; the summaries are constants, and fresh at every call."""
    x = sample(0, (3, 6), torch.float64)
    columns = [t.to(comm.device) for t in summaries(6, torch.float64)]
    for kind in KINDS[:3]:

        def body(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, kind: Any = kind) -> Any:
            fixed = [t.clone() for t in columns[:3]]
            kwargs = keywords([*fixed, w, b], kind)
            return data_norm(x, *fixed, sync_stats=kind[0] == "gpu", **kwargs)

        inputs = leaves(comm, x, *columns[3:])
        if not kind[2]:
            inputs[1:] = [t.detach() for t in inputs[1:]]
        assert_equal(torch.autograd.gradcheck(body, inputs), True, kind)
    x[::2, 2:4] = 0
    fixed = x.to(comm.device)

    def masked(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        still = torch.arange(6, device=comm.device) != 2
        held = torch.where(still, x, fixed)  # a step of 1e-6 would show the group
        return data_norm(held, *columns[:3], scale_w=w, bias=b, slot_dim=2, behaviour="cpu")

    assert_equal(
        torch.autograd.gradcheck(masked, leaves(comm, x, *columns[3:])), True, "skipped groups"
    )
    leaf, w, b = leaves(comm, x, *columns[3:])
    (first,) = torch.autograd.grad(masked(leaf, w, b).sum(), leaf, create_graph=True)
    with raises(ArgumentError, "has no gradient"):
        first.sum().backward()


@runs_on("ranks")
def test_registration(comm: Any) -> None:
    """Run torch's own checks of a registered operator: schema, fake against real, autograd."""
    named = torch.ops.commlib
    for dtype in DTYPES:
        for behaviour, slot_dim, shifts in KINDS[:: len(KINDS) // 4]:
            leaf, *params = leaves(comm, rows(0, (4, 6), dtype), *summaries(6, dtype))
            columns = params if shifts else [*params[:3], None, None]
            gpu = behaviour == "gpu"
            for trains in (True, False):
                args = (0, EPSILON, slot_dim, 0.5, gpu, gpu, trains, True)
                checked = leaf if trains else leaf.detach()
                rest = [g if trains or g is None else g.detach() for g in columns]
                well_registered(named.data_norm.default, (checked, *rest, *args))
    x, *params = (t.detach().to(comm.device) for t in (leaf, *summaries(6, dtype)))
    well_registered(named.data_norm_grad.default, (x, params[0], x, *params[1:3], 2))
    batch = torch.stack(params[:3])
    well_registered(named.data_norm_update.default, (batch, *params[:3], 0, 0.5, True, True))


SIZES = st.tuples(
    *(st.integers(0, 6), st.integers(0, 4), st.integers(1, 4), st.booleans(), st.integers(0, 5))
)


@examples(5)
@given(cases=st.lists(SIZES, min_size=8, max_size=8))
@runs_on("ranks")
def test_any_batches(comm: Any, cases: list[tuple[int, int, int, bool, int]]) -> None:
    for count, groups, slot_dim, shifts, seed in cases:
        x = rows(comm.rank, (count, groups * slot_dim), torch.float64, seed)
        columns = summaries(groups * slot_dim, torch.float64, seed)
        agrees(comm, x, columns, ("cpu", slot_dim, shifts))
        agrees(comm, x, columns, ("gpu", -1, False), decay=0.5 + seed / 10)
