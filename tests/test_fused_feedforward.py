"""ops.fused_feedforward: a tensor-parallel feed-forward block, against NumPy."""

from typing import Any

import numpy as np
import torch

from commlib import graph, ops
from commlib.errors import ArgumentError, DtypeError, RingError, ShapeError
from tests.support.checks import Array, assert_bits_equal, assert_equal, on_gpu, raises
from tests.support.class_shards import near
from tests.support.operator import ABSENT_RING, calls, compile_whole
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on
from tests.support.transformer import FeedForward, block, draw

# Any: the tests also pass arguments that a type checker rejects.
feedforward: Any = ops.fused_feedforward

BATCH, TOKENS, WIDTH, UNITS = 2, 3, 8, 12  # units of one, two and three ranks
NAMES = (
    "linear1_weight", "linear1_bias", "linear2_weight", "linear2_bias", "ln_weight", "ln_bias",
)  # fmt: skip
SHARDED = {"linear1_weight": 1, "linear1_bias": 0, "linear2_weight": 0}  # along this dim
# operators.md, section 6; wider dtypes leave what their own rounding does.
NEAR = {
    torch.float64: (1e-9, 1e-10),
    torch.float32: (1e-5, 5e-5),
    torch.float16: (2e-2, 2e-2),
    torch.bfloat16: (8e-2, 1.5e-1),
}
Torches = dict[str, torch.Tensor]


def shapes(units: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a block with that many units, of its input and of its gradient."""
    inner = {"linear1_weight": (WIDTH, units), "linear1_bias": (units,)}
    rows = dict.fromkeys(("linear2_bias", "ln_weight", "ln_bias"), (WIDTH,))
    hidden = (BATCH, TOKENS, WIDTH)
    return inner | {"linear2_weight": (units, WIDTH)} | rows | {"x": hidden, "grad": hidden}


def shard(name: str, weight: Array, rank: int, size: int) -> Array:
    """Return the part of a rank: its hidden units, and all of what every rank has."""
    return np.split(weight, size, SHARDED[name])[rank] if name in SHARDED else weight


class Case:
    """One block: all weights in NumPy, and this rank's tensors."""

    def __init__(
        self, comm: Any, dtype: torch.dtype = torch.float64, names: Any = NAMES, size: int = 0
    ) -> None:
        self.comm, self.dtype, self.size = comm, dtype, size or comm.size
        self.rank = comm.rank if self.size > 1 else 0
        drawn = draw(1, shapes(-(-UNITS // comm.size) * comm.size))  # as many units on every rank
        drawn = {name: torch.from_numpy(a).to(dtype).double().numpy() for name, a in drawn.items()}
        self.x, self.grad = drawn.pop("x"), drawn.pop("grad")
        self.weights = {name: drawn[name] for name in names}

    def on_device(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.dtype).to(self.comm.device)

    def tensors(self) -> Torches:
        """Return fresh parameters of this rank, and x."""
        parts = {name: shard(name, w, self.rank, self.size) for name, w in self.weights.items()}
        return {n: self.on_device(p).requires_grad_() for n, p in (parts | {"x": self.x}).items()}

    def run(self, **how: Any) -> tuple[torch.Tensor, Torches]:
        """Return the result and all gradients."""
        inputs = self.tensors()
        y = feedforward(**inputs, **how)
        grads = torch.autograd.grad(y, list(inputs.values()), self.on_device(self.grad))
        return y.detach(), dict(zip(inputs, grads, strict=True))

    def check(
        self, found: tuple[torch.Tensor, Torches], what: str, activation: str = "relu", **how: Any
    ) -> None:
        """Raise unless result and gradients are those of the formula."""
        inner = FeedForward(self.weights, activation, how.pop("keep_units", 1.0))
        want, formulas = block(self.x, inner, self.grad, **how)
        rtol, atol = NEAR[self.dtype]
        y, grads = found
        assert_equal(y.dtype, self.dtype, what)
        near(y, want, what, rtol, atol)
        assert_equal(sorted(grads), sorted(formulas), f"{what}: gradients")
        for name, formula in formulas.items():
            part = shard(name, formula, self.rank, self.size)
            near(grads[name], part, f"{what}: {name}", rtol, atol * 4)
            strides = self.tensors()[name].stride()
            assert_equal(grads[name].stride(), strides, f"{what}: {name}: strides")


def values(comm: Any) -> None:
    """Both places of the norm and activations, every dtype; one all_reduce in each direction."""
    for dtype in NEAR:
        case = Case(comm, dtype)
        for before, activation in ((False, "gelu"), (True, "relu")):
            start = calls(comm)
            results = case.run(pre_layer_norm=before, activation=activation)
            assert_equal(calls(comm) - start, 2, "collectives")
            start = calls(comm)
            feedforward(**case.tensors(), pre_layer_norm=before)
            assert_equal(calls(comm) - start, 1, "collectives of the forward")
            case.check(results, f"{dtype}, {activation}", activation, before=before)


def test_values(ranks: Ranks) -> None:
    ranks(values)


def test_values_of_more_ranks(many_ranks: Ranks) -> None:
    many_ranks(values)


@runs_on("ranks")
def test_options(comm: Any) -> None:
    """Biases, the norm's parameters and the residual are optional; -1 is one rank."""
    few = ("linear1_weight", "linear2_weight")
    for before in (False, True):
        case = Case(comm, names=few)
        case.check(case.run(pre_layer_norm=before), f"{before}", before=before)
        results = case.run(pre_layer_norm=before, add_residual=False)
        case.check(results, f"{before}, no residual", before=before, add_residual=False)
        start, alone = calls(comm), Case(comm, size=1)
        alone.check(alone.run(pre_layer_norm=before, ring_id=-1), "one rank", before=before)
        assert_equal(calls(comm), start, "collectives of one rank")


@runs_on("ranks")
def test_dropout(comm: Any) -> None:
    """Masks of the whole for any number of ranks: inside each has its part, then all the same."""
    rates = {"dropout1_rate": 0.25, "dropout2_rate": 0.4}
    torch.manual_seed(4)
    units = torch.empty(BATCH, TOKENS, UNITS, dtype=torch.bool, device=comm.device).bernoulli_(0.75)
    ones = torch.ones(BATCH, TOKENS, WIDTH, dtype=torch.float64, device=comm.device)
    keep = torch.nn.functional.dropout(ones, 0.4).cpu().numpy()
    keep_units = units.cpu().numpy() / 0.75
    halves = [shard("linear1_weight", m, r, comm.size) for r in range(comm.size) for m in units[:1]]
    assert_equal(
        any(bool((half != halves[0]).any()) for half in halves[1:]), True, "masks of two ranks"
    )
    for case, ring in ((Case(comm), 0), (Case(comm, size=1), -1)):
        torch.manual_seed(4)
        results = case.run(**rates, ring_id=ring)
        case.check(results, f"ring {ring}", before=False, keep=keep, keep_units=keep_units)
        plain = case.run(**rates, ring_id=ring, training=False)
        case.check(plain, f"ring {ring}, inference", before=False)
        scaled = case.run(**rates, ring_id=ring, training=False, upscale_in_train=False)
        case.check(scaled, f"ring {ring}, scaled", before=False, keep=0.6, keep_units=0.75)


@runs_on("ranks", deadline=240)
def test_every_form(comm: Any) -> None:
    """Compiled and captured code gives eager's values and gradients; so does autocast nearly."""
    case = Case(comm, torch.float32)
    inputs, grad = case.tensors(), case.on_device(case.grad)
    names = list(inputs)

    def body(*tensors: torch.Tensor) -> Any:
        named = dict(zip(names, tensors, strict=True))
        return feedforward(**named, pre_layer_norm=True, activation="gelu")

    def found(call: Any) -> list[torch.Tensor]:
        y = call(*inputs.values())
        return [y.detach().clone(), *torch.autograd.grad(y, list(inputs.values()), grad)]

    want = found(body)
    replayed = graph.capture(body, verify=False)
    for label, call in (("compiled", compile_whole(body)), ("captured", replayed)):
        for _ in range(3):
            before = calls(comm)
            for one, other in zip(found(call), want, strict=True):
                assert_bits_equal(one, other, label, atol=1e-5)
            count = calls(comm) - before
        by_host = 0 if label == "captured" and on_gpu(comm) else 2
        assert_equal(count, by_host, f"calls from the host, {label}")
    (row,) = graph.report(replayed)
    assert_equal(len(row["collectives"]), 2, "collectives of the graphs")
    with torch.autocast(comm.device.type, torch.bfloat16):
        y, *grads = found(body)
    assert_equal({t.dtype for t in (y, *grads)}, {torch.float32}, "dtypes under autocast")
    case.dtype = torch.bfloat16
    found_grads = dict(zip(names, grads, strict=True))
    case.check((y.bfloat16(), found_grads), "autocast", "gelu", before=True)


@runs_on("ranks")
def test_refusals(comm: Any) -> None:
    """Wrong arguments are errors before any launch, which say what to pass instead."""
    case = Case(comm)
    plain = {name: t.detach() for name, t in case.tensors().items()}
    x, units = plain["x"], UNITS // comm.size

    def call(**changes: Any) -> None:
        feedforward(**(plain | changes))

    before = calls(comm)
    expected = {name: tuple(t.shape) for name, t in plain.items() if name != "x"}
    wrong = {"linear1_weight": x.new_zeros(WIDTH + 1, units)}
    wrong["linear2_weight"] = x.new_zeros(UNITS, WIDTH)  # of all ranks
    for name, shape in expected.items():
        tensor = wrong.get(name, x.new_zeros(1))
        text = f"{name} has shape {tuple(tensor.shape)}; expected {shape}"
        with raises(ShapeError, f"rank {comm.rank}", "ring 0", text):
            call(**{name: tensor})
        with raises(DtypeError, f"{name} is torch.float16", "torch.autocast"):
            call(**{name: plain[name].half()})
    with raises(ShapeError, "linear1_weight has shape", "[width, units]"):
        call(linear1_weight=x)
    with raises(ShapeError, "x has shape", "[batch, tokens, width]"):
        call(x=x[0])
    with raises(ArgumentError, "activation='tanh'; expected 'relu' or 'gelu'"):
        call(activation="tanh")
    for name in ("dropout1_rate", "dropout2_rate"):
        with raises(ArgumentError, f"{name}=1.5; expected a number from 0 to 1"):
            call(**{name: 1.5})
    with raises(RingError, ABSENT_RING):
        call(ring_id=ABSENT_RING)
    assert_equal(calls(comm), before, "collectives of wrong calls")
