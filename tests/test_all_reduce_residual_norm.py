"""ops.all_reduce_residual_norm: a sum over the ranks, a residual, and the norm of the rows.

On GPUs the same programs run the fused kernels and, for rows that these do not take, the
composition; what only hardware shows returns at once elsewhere.
"""

import contextlib
import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import commlib
from commlib import ops
from commlib.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    RingError,
    ShapeError,
)
from commlib.ops.tensor_parallel import _all_reduce_residual_norm as room
from commlib.p2p import fused_norm as fused
from tests.support.checks import (
    Array,
    Shape,
    assert_bits_equal,
    assert_equal,
    bits,
    raises,
    rounded,
    sample,
    wide,
)
from tests.support.class_shards import near
from tests.support.operator import ABSENT_RING, calls, compile_whole, generating, well_registered
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

norm_of = ops.all_reduce_residual_norm
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = torch.float8_e4m3fn
# Half a step of the dtype, and what float32 leaves of values around 1 before that rounding.
NEAR = {
    torch.float32: (4e-6, 1e-5),
    torch.float16: (2**-11 + 4e-6, 1e-5),
    torch.bfloat16: (2**-8 + 4e-6, 1e-5),
    FLOAT8: (2**-4 + 4e-6, 2**-10 + 1e-5),
}
KINDS: list[dict[str, Any]] = [
    {},
    {"linear_bias": True},
    {"norm": "layer"},
    {"norm": "layer", "bias": True, "linear_bias": True, "eps": 1e-3},
    {"scale": 0.05},
    {"norm": "layer", "bias": True, "scale": 2.0},
]


class Case:
    """The tensors of one call on every rank, and what they must give."""

    def __init__(
        self, comm: Any, shape: Shape, dtype: torch.dtype, kind: dict[str, Any], seed: int = 0
    ) -> None:
        self.comm, self.dtype, self.kind = comm, dtype, kind
        row, device = shape[-1:], comm.device
        self.inputs = [sample(rank, shape, dtype, seed) for rank in range(comm.size)]
        self.x = self.inputs[comm.rank].to(device)
        self.residual = sample(20, shape, dtype, seed).to(device)
        self.weight = sample(21, row, dtype, seed).to(device)
        self.how: dict[str, Any] = {}
        for number, name in enumerate(("bias", "linear_bias")):
            if kind.get(name):
                self.how[name] = sample(22 + number, row, dtype, seed).to(device)
        if "scale" in kind:
            self.how["scale"] = torch.full((1,), kind["scale"], device=device)
            self.how["out_dtype"] = FLOAT8
        self.how |= {name: kind[name] for name in ("norm", "eps") if name in kind}
        self.what = f"{dtype} {shape} {kind}"

    def call(self, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        y, total = norm_of(self.x, self.residual, self.weight, **self.how, **more)
        return y, total

    def composed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what all_reduce and torch operators give."""
        names = "bias", "linear_bias", "scale"
        layer, eps = self.kind.get("norm") == "layer", self.kind.get("eps", 1e-6)
        params = (self.how.get(name) for name in names)
        norm = fused.Norm(self.residual, self.weight, *params, layer, eps)
        return room.composed(self.comm, self.x, norm, True)

    def total(self) -> torch.Tensor:
        """Return the rows before the norm, from the sum that all_reduce gives."""
        total: torch.Tensor = ops.all_reduce(self.x).float()
        if "linear_bias" in self.how:
            total = total + self.how["linear_bias"].float()
        return (total + self.residual.float()).to(self.dtype)

    def check(self, y: torch.Tensor, total: torch.Tensor) -> None:
        """Raise unless both are right; ``total`` to the bit."""
        assert_bits_equal(total, self.total(), f"{self.what}: before the norm")
        assert_equal(y.dtype, FLOAT8 if "scale" in self.kind else self.dtype, f"{self.what}: dtype")
        actual = y.float() if y.dtype is FLOAT8 else y
        near(actual, self.formula(wide(total)), f"{self.what}: y", *NEAR[y.dtype])

    def formula(self, total: Array) -> Array:
        """Return y in float64."""
        rows = total.astype("f8")
        if self.kind.get("norm") == "layer":
            rows = rows - rows.mean(-1, keepdims=True)
        variance = (rows**2).mean(-1, keepdims=True)
        y: Array = rows / np.sqrt(variance + self.kind.get("eps", 1e-6)) * wide(self.weight)
        if "bias" in self.how:
            y = y + wide(self.how["bias"])
        if "scale" in self.how:
            y = np.clip(y / wide(self.how["scale"]).astype("f8"), -448, 448)
        return y


def equal_everywhere(comm: Any, what: str, *tensors: torch.Tensor) -> None:
    """Raise unless all ranks hold the same bits."""
    digests = comm.exchange([zlib.crc32(bits(x).tobytes()) for x in tensors])
    assert_equal(digests, [digests[0]] * comm.size, f"{what}: digests of the bits on each rank")


def checked(comm: Any, shape: Shape, dtype: torch.dtype, kind: dict[str, Any]) -> None:
    case = Case(comm, shape, dtype, kind, seed=len(shape))
    before = calls(comm)
    y, total = case.call()
    assert_equal(calls(comm) - before, 1, f"{case.what}: collectives")
    case.check(y, total)
    assert_bits_equal(case.x, case.inputs[comm.rank], f"{case.what}: x afterwards")
    equal_everywhere(comm, case.what, y, total)


# Lengths of rows: parts of a vector, whole ones, one to four a thread, and more than a block has.
LENGTHS = (1, 8, 64, 136, 1000, 1001, 8192)
LONG = (4096, 12_296, 16_384, 20_000)


def values(comm: Any, lengths: tuple[int, ...], leads: list[Shape]) -> None:
    """Every dtype and kind, for rows of every length."""
    for dtype, items in itertools.product(DTYPES, lengths):
        for number, lead in enumerate(leads):
            kinds = KINDS if items <= 1001 else KINDS[number % 6 :: 6]
            for kind in kinds:
                checked(comm, (*lead, items), dtype, kind)


def test_values(ranks: Ranks) -> None:
    ranks(values, LENGTHS, [(1,), (2,), (3,), (5,), (2, 2)], deadline=240)


def test_long_rows(unified_ranks: Ranks) -> None:
    unified_ranks(values, LONG, [(1,), (3,), (), (2,), (5,), (1, 2, 2)], deadline=240)


def test_values_of_more_ranks(many_ranks: Ranks) -> None:
    many_ranks(values, (8, 24, 136, 1001, 8192), [(1,), (3,), (5,)], deadline=240)


@runs_on("ranks")
def test_sum_of_two(comm: Any) -> None:
    """The rows before the norm by NumPy alone: two ranks' sum has one rounding on every engine."""
    for dtype in DTYPES:
        case = Case(comm, (3, 136), dtype, {"linear_bias": True})
        one, other = (wide(x) for x in case.inputs)
        added = wide(rounded(one + other, dtype)) + wide(case.how["linear_bias"])
        assert_bits_equal(case.call()[1], added + wide(case.residual), f"{dtype}")


@runs_on("ranks")
def test_empty(comm: Any) -> None:
    """No rows, or rows without values: empty results, one call like any other."""
    for dtype, shape in itertools.product(DTYPES, [(0, 64), (2, 0, 8), (0,), (3, 0)]):
        for kind in KINDS[3:5]:
            case = Case(comm, shape, dtype, kind)
            y, total = case.call()
            wanted = FLOAT8 if "scale" in kind else dtype
            assert_equal((tuple(y.shape), y.dtype), (shape, wanted), case.what)
            assert_equal((tuple(total.shape), total.dtype), (shape, dtype), case.what)


@runs_on("ranks")
def test_specials(comm: Any) -> None:
    """NaN and infinity give what the formula makes of them; a row of zeros is 0, or the bias."""
    for dtype, kind in itertools.product(DTYPES, KINDS):
        case = Case(comm, (4, 64), dtype, kind)
        case.x[1, 5], case.residual[2, 7] = torch.nan, torch.inf
        case.x[3], case.residual[3] = -0.0, 0.0
        y, total = case.call()
        y = y.float() if y.dtype is FLOAT8 else y
        with np.errstate(invalid="ignore"):
            want = case.formula(wide(total))
        near(y, want, case.what, *NEAR[FLOAT8 if "scale" in kind else dtype])
        assert_equal(bool(y[1].isnan().all()), True, f"{case.what}: the row with a NaN")
        assert_equal(bool(y[2, 7].isnan()), True, f"{case.what}: the infinity")
        assert_equal(int(y[[0, 3]].isnan().sum()), 0, f"{case.what}: NaNs in other rows")
        if not kind.get("linear_bias"):
            assert_equal(int(total[3].count_nonzero()), 0, f"{case.what}: zeros before the norm")


@runs_on("ranks")
def test_eight_bits(comm: Any) -> None:
    """What is too large for 8 bits becomes the largest; a scale that changes counts."""
    for dtype in DTYPES:
        case = Case(comm, (2, 64), dtype, {"scale": 1e-5})
        y = case.call()[0].float()
        signs = np.sign(case.formula(wide(case.total())))
        large = np.abs(case.formula(wide(case.total()))) >= 448
        assert_equal(bool(large.mean() > 0.9), True, "values beyond")
        assert_equal(
            bool((wide(y)[large] == 448 * signs[large]).all()), True, f"{dtype}: saturated"
        )
        case.how["scale"].fill_(1.0)
        case.check(*case.call())


@runs_on("ranks")
def test_strided(comm: Any) -> None:
    """Tensors of any strides and at any address count with their values."""
    for dtype, items in itertools.product(DTYPES, (136, 1001)):
        case = Case(comm, (3, items), dtype, KINDS[3])
        want = case.call()
        plain = case.x, case.residual, case.weight

        def shifted(x: torch.Tensor) -> torch.Tensor:
            flat = x.new_empty(x.numel() + 1)
            return flat[1:].view(x.shape).copy_(x)

        def stepped(x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x, x], -1)[..., 0]

        def turned(x: torch.Tensor) -> torch.Tensor:
            return x.t().contiguous().t()

        for layout in (shifted, stepped, turned):
            case.x, case.residual, case.weight = map(layout, plain)
            case.how |= {name: layout(case.how[name]) for name in ("bias", "linear_bias")}
            for actual, wanted in zip(case.call(), want, strict=True):
                assert_bits_equal(actual, wanted, f"{case.what} {layout.__name__}")
        case.x, case.residual, case.weight = plain
        case.residual = case.residual[:1].expand(3, items)
        case.check(*case.call())


@runs_on("ranks")
def test_streams(comm: Any) -> None:
    """On the ring's stream too, in a new dtype or not, while the results are used at once."""
    for kind in (KINDS[0], KINDS[5]):
        case = Case(comm, (4, 256), torch.bfloat16, kind)
        for actual, want in zip(case.call(use_calc_stream=False), case.call(), strict=True):
            assert_bits_equal(actual, want, case.what)


# -- compiled --------------------------------------------------------------------------------------


def compiled(comm: Any, backend: str, kinds: list[dict[str, Any]]) -> None:
    """Compiled as one graph: eager's bits, each call once, also where nobody uses the result."""
    for dtype, kind in itertools.product((torch.float32, torch.bfloat16), kinds):
        case = Case(comm, (3, 136), dtype, kind)

        def layers(x: torch.Tensor, case: Case = case) -> tuple[torch.Tensor, ...]:
            norm_of(x, case.residual, case.weight, **case.how)  # not used
            y, total = norm_of(x, case.residual, case.weight, **case.how)
            return y, *norm_of(x, total, case.weight, use_calc_stream=False)

        before = calls(comm)
        want = layers(case.x)
        launched = calls(comm) - before
        graph = compile_whole(layers, backend=backend)
        for turn in range(2):
            before = calls(comm)
            actual = graph(case.x)
            assert_equal(calls(comm) - before, launched, f"{case.what}: collectives of turn {turn}")
            for one, other in zip(actual, want, strict=True):
                assert_bits_equal(one, other, f"{case.what} {backend}")


def test_compiled(ranks: Ranks) -> None:
    ranks(compiled, "aot_eager", KINDS, deadline=120)


def test_generated_code(unified_ranks: Ranks) -> None:
    generating(unified_ranks)(compiled, "inductor", KINDS[3:5], deadline=240)


@runs_on("ranks", deadline=120)
def test_compiled_sizes(comm: Any) -> None:
    """One graph for any number and length of rows."""
    graph = compile_whole(norm_of, dynamic=True)
    for shape in ((2, 64), (5, 136), (3, 1001), (7, 8)):
        case = Case(comm, shape, torch.bfloat16, KINDS[0])
        for got, want in zip(graph(case.x, case.residual, case.weight), case.call(), strict=True):
            assert_bits_equal(got, want, case.what)


@runs_on("ranks")
def test_registered(comm: Any) -> None:
    operator = torch.ops.commlib.all_reduce_residual_norm.default
    for kind in KINDS:
        case = Case(comm, (2, 64), torch.bfloat16, kind)
        others = (case.how.get(name) for name in ("bias", "linear_bias", "scale"))
        layer = kind.get("norm") == "layer"
        args = case.x, case.residual, case.weight, *others, 0, layer, 1e-6, True
        well_registered(operator, args)


# -- bad input -------------------------------------------------------------------------------------


@contextlib.contextmanager
def refused(comm: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give an input and a row to wrong calls; nothing is launched by them.

    A wrong call is one of our errors with the numbers in it.
    """
    x, row = torch.ones(4, 24, device=comm.device), torch.ones(24, device=comm.device)
    before = calls(comm)
    yield x, row
    assert_equal(calls(comm), before, "calls launched by refused ones")
    y, total = norm_of(x, x, row, out_dtype=x.dtype)
    assert_equal(
        (set(total.view(-1).tolist()), y.dtype), ({comm.size + 1.0}, x.dtype), "after refusals"
    )


@runs_on("ranks")
def test_refused_inputs(comm: Any) -> None:
    with refused(comm) as (x, row):
        with raises(RingError, ABSENT_RING):
            norm_of(x, x, row, ABSENT_RING)
        with raises(ArgumentError, "x is list"):
            norm_of([1.0], x, row)
        for name, tensors in (("residual", (x, None, row)), ("weight", (x, x, None))):
            with raises(ArgumentError, f"{name} is NoneType", "ring 0", f"rank {comm.rank}"):
                norm_of(*tensors)
        for kind in (torch.float64, torch.int64, FLOAT8):
            with raises(DtypeError, f"x is {kind}", "bfloat16"):
                norm_of(x.to(kind), x.to(kind), row.to(kind))
        with raises(ShapeError, "0-D"):
            norm_of(x[0, 0], x[0, 0], row)
        for wrong in (x[:3], x[0], x.view(2, 2, 24)):
            with raises(ShapeError, "residual", tuple(wrong.shape), "(4, 24)"):
                norm_of(x, wrong, row)
        with raises(DtypeError, "residual is torch.bfloat16"):
            norm_of(x, x.bfloat16(), row)
        with raises(DeviceError, "sparse"):
            norm_of(x.to_sparse(), x, row)
        with comm.group(), raises(ArgumentError, "ring.group()", "all_reduce_residual_norm"):
            norm_of(x, x, row)


@runs_on("ranks")
def test_refused_weights_and_biases(comm: Any) -> None:
    with refused(comm) as (x, row):
        for name in ("weight", "bias", "linear_bias"):
            kwargs: dict[str, Any] = {"weight": row, "norm": "layer"}
            for wrong in (row[:23], x):
                with raises(ShapeError, name, tuple(wrong.shape), "(24,)"):
                    norm_of(x, x, **(kwargs | {name: wrong}))
            with raises(DtypeError, f"{name} is torch.float16", "torch.float32", f"{name}.to("):
                norm_of(x, x, **(kwargs | {name: row.half()}))
            with raises(DeviceError, f"{name} is on meta", comm.device):
                norm_of(x, x, **(kwargs | {name: row.to("meta")}))
        with raises(ArgumentError, "norm='batch'", "'rms' or 'layer'"):
            norm_of(x, x, row, norm="batch")
        with raises(ArgumentError, "bias with norm='rms'", "linear_bias"):
            norm_of(x, x, row, bias=row)
        for eps in (-1e-6, float("nan"), float("inf"), None, "0", True):
            with raises(ArgumentError, f"eps={eps!r}", "eps=1e-6"):
                norm_of(x, x, row, eps=eps)


@runs_on("ranks")
def test_refused_scales(comm: Any) -> None:
    with refused(comm) as (x, row):
        scale = row[:1]
        with raises(DtypeError, "out_dtype=torch.bfloat16", "torch.float8_e4m3fn", "torch.float32"):
            norm_of(x, x, row, out_dtype=torch.bfloat16)
        with raises(ArgumentError, "without scale=", "scale="):
            norm_of(x, x, row, out_dtype=FLOAT8)
        with raises(ArgumentError, "with scale=", "out_dtype=None"):
            norm_of(x, x, row, scale=scale)
        for number, error in (
            (scale.double(), DtypeError),
            (row[:2], ShapeError),
            (1.0, ArgumentError),
            (scale.to("meta"), DeviceError),
        ):
            with raises(error, "scale"):
                norm_of(x, x, row, scale=number, out_dtype=FLOAT8)


@runs_on("ranks")
def test_gradients(comm: Any) -> None:
    """There is none, and a call that seems to want one says so; under no_grad it is a call."""
    x, row = torch.ones(4, 24, device=comm.device), torch.ones(24, device=comm.device)
    before = calls(comm)
    for number in range(3):
        args = [x, x.clone(), row]
        args[number] = args[number].clone().requires_grad_()
        with raises(ArgumentError, "no gradient", "no_grad", ".detach()"):
            norm_of(*args)
        with raises(Exception, "no gradient"):  # some torch wraps errors of traced code
            compile_whole(norm_of)(*args)
        assert_equal(calls(comm), before, "calls launched by refused ones")
        with torch.no_grad():
            y, total = norm_of(*args)
        with torch.inference_mode():
            norm_of(*args)
        assert_equal((y.requires_grad, total.requires_grad), (False, False), "results")
        before += 2


# -- rings -----------------------------------------------------------------------------------------


@runs_on("ranks")
def test_one_rank(comm: Any) -> None:
    """A ring of one rank: the norm of x and residual."""
    ring = commlib.new_ring(50 + comm.rank, [comm.rank])
    assert ring is not None
    for kind in KINDS:
        case = Case(comm, (3, 136), torch.bfloat16, kind)
        y, total = case.call(ring_id=ring.ring_id)
        want = case.x.float()
        if "linear_bias" in case.how:
            want = want + case.how["linear_bias"].float()
        assert_bits_equal(
            total, (want + case.residual.float()).to(case.dtype), f"{case.what}: before"
        )
        actual = y.float() if y.dtype is FLOAT8 else y
        near(actual, case.formula(wide(total)), f"{case.what}: y", *NEAR[y.dtype])
