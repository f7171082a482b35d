"""One operator as the shared suites see it: how it is called, and what it means."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import commlib
from tests.support.checks import (
    MOVABLE,
    Array,
    Shape,
    assert_equal,
    bits,
    from_bits,
    laid_out,
    rounded,
    sample,
    wide,
    with_specials,
)
from tests.support.ranks import Ranks

MODES: dict[str, dict[str, bool]] = {
    "calc": {"use_calc_stream": True},
    "comm": {"use_calc_stream": False},
    "async": {"use_calc_stream": False, "sync_op": False},
}
FEW = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)
ABSENT_RING = 77


@dataclass(frozen=True)
class Operator:
    """The call of an operator, and its meaning.

    ``formula(inputs, rank)`` gives the result on ``rank`` from every rank's input. An operator
    that only moves values is fed bit patterns, one that ``reduces`` is fed numbers.
    ``adjoint(weights, rank)`` gives the gradient of ``rank``'s input from every rank's weights.
    """

    call: Callable[..., Any]
    formula: Callable[[list[Array], int], Array]
    adjoint: Callable[[list[Array], int], Array] | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = MOVABLE
    reduces: bool = False
    modes: tuple[str, ...] = tuple(MODES)
    divides: bool = False  # dim 0 of x divides by the ring's size
    in_place: bool = False  # out=x is allowed
    only_root: bool = False  # out= is written on keywords["root"] alone

    def __call__(self, x: Any, ring_id: int = 0, **more: Any) -> Any:
        """Call the operator and wait for a Work."""
        result = self.call(x, ring_id, **self.keywords, **more)
        return result.wait() if isinstance(result, commlib.Work) else result

    def start(self, x: torch.Tensor, **more: Any) -> commlib.Work:
        """Start the operator and return its Work."""
        work = self.call(x, **self.keywords, **MODES["async"], **more)
        assert_equal(type(work), commlib.Work, "result with sync_op=False")
        return work  # type: ignore[no-any-return]  # checked

    def ways(self) -> dict[str, dict[str, bool]]:
        """Return the modes this operator has."""
        return {name: MODES[name] for name in self.modes}

    def writes(self, comm: Any) -> bool:
        """Return True if this rank's out= is written."""
        return not self.only_root or bool(comm.rank == self.keywords["root"])

    def shapes(self, size: int) -> list[Shape]:
        """Return shapes with empty, single and odd dimensions; 0-D where it has a meaning."""
        plain: list[Shape] = [(6, 5), (1,), (7,), (0,), (0, 3), (3, 0), (2, 3, 4)]
        return [(n * size, *rest) for n, *rest in plain] if self.divides else [*plain, ()]

    def few(self) -> list[torch.dtype]:
        """Return one dtype of each kind."""
        return [dtype for dtype in FEW if dtype in self.dtypes]

    def inputs(self, comm: Any, shape: Shape, dtype: torch.dtype, **how: Any) -> list[torch.Tensor]:
        """Return every rank's input, on this rank's device."""
        layout, seed = how.get("layout", "contiguous"), how.get("seed", 0)
        drawn = [sample(rank, shape, dtype, seed) for rank in range(comm.size)]
        if not self.reduces:
            drawn = [with_specials(x) for x in drawn]
        return [laid_out(x, layout, comm.device) for x in drawn]

    def expected(self, comm: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Return the formula's result on this rank."""
        encode, decode = (wide, rounded) if self.reduces else (bits, from_bits)
        return decode(self.formula([encode(x) for x in inputs], comm.rank), inputs[0].dtype)

    def shape(self, size: int) -> Shape:
        """Return a shape for one plain call."""
        return self.shapes(size)[0]

    def example(self, comm: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's input and expected result for one plain call."""
        inputs = self.inputs(comm, self.shape(comm.size), how.pop("dtype", self.dtypes[0]), **how)
        return inputs[comm.rank], self.expected(comm, inputs)


def calls(comm: Any) -> int:
    """Return how many collectives were launched on the ring so far."""
    rows = commlib.CommContextManager.instance().report()
    return next(int(row["calls"]) for row in rows if row["ring_id"] == comm.ring_id)


def compile_whole(body: Callable[..., Any], **how: Any) -> Any:
    """Compile ``body`` as one graph, without code generation unless ``how`` names a backend."""
    torch._dynamo.reset()
    return torch.compile(body, fullgraph=True, **{"backend": "aot_eager", **how})


@functools.cache
def _compile_something(device: torch.device) -> None:
    torch.compile(lambda x: x.sin() + 1)(torch.ones(64, device=device))


def _try_compiler(comm: Any) -> None:
    _compile_something(comm.device)


def generating(ranks: Ranks) -> Ranks:
    """Let inductor try out the compiler in each rank before a collective waits for that.

    Where torch starts another Python for every vector length, each process takes up to a minute.
    """
    ranks(_try_compiler, deadline=300)
    return ranks


def well_registered(operator: Any, arguments: tuple[Any, ...]) -> None:
    """Run torch's own checks of a registered operator: schema, fake against real, autograd."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, arguments, test_utils=checks)
