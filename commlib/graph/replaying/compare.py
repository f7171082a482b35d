"""Compare the effects of a function call with those of its replay, bit for bit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from commlib.core.tensors import parts
from commlib.engines import local
from commlib.graph.calls.key_values import value
from commlib.graph.calls.outputs import flat
from commlib.graph.python.changes import Change
from commlib.graph.watching.effects import TOGETHER, Effects, Held

Tolerance = tuple[float, float]
Item = tuple[Any, int]  # a compared item: its kind and its number


class Pair(NamedTuple):
    """A tensor after the function and after the replay."""

    item: Item
    name: str
    one: torch.Tensor
    other: torch.Tensor


class Left(NamedTuple):
    """The results and side effects of a call or a replay.

    Attributes:
        results: The results, by kind.
        bound: The numbers, strings and tensors that were bound to names.
        held: Memory, gradients and generators.
    """

    results: dict[str, Any]
    bound: list[Change]
    held: Held


class Difference(NamedTuple):
    """One difference between the replay and the function."""

    item: Item
    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.what} {self.detail}"


class Noise:
    """Results that are known to differ in bits between runs of a function.

    Noise spreads: what is computed from noisy numbers has the same bits in most runs, and other
    bits in some. So it is known by kind (outputs, gradients, memory, one name).

    Attributes:
        kinds: Kinds with numbers that differ, and agree to half of their digits.
        wild: Items that can't be compared: numbers that differ more, and non-numbers. By item,
            their names.
    """

    def __init__(self, known: "Noise | None" = None) -> None:
        """``known``: what is copied."""
        self.kinds: set[Any] = set() if known is None else {*known.kinds}
        self.wild: dict[Item, str] = {} if known is None else {**known.wild}

    def __bool__(self) -> bool:
        return bool(self.kinds or self.wild)

    def note(
        self,
        compare: Callable[..., "Comparison"],
        one: Left,
        other: Left,
        *,
        half: bool = False,
        small: bool = False,
    ) -> None:
        """Add what differs between two runs of the function.

        Args:
            compare: Returns a comparison, with this noise.
            one: What a run has left.
            other: What another run has left.
            half: Less than half of the digits do not count.
            small: More than half of the digits do not count.
        """
        wild = {x.item: x.what for x in compare(self, half=True).differences(one, other)}
        items = {x.item for x in compare(self, half=half).differences(one, other)}
        self.kinds.update(kind for kind, number in items if (kind, number) not in wild)
        if not small:
            self.wild.update(wild)


class Comparison:
    """A comparison of a function call's effects with those of a replay."""

    def __init__(
        self, effects: Effects, tolerance: Tolerance | None, noise: Noise, *, half: bool
    ) -> None:
        """``half``: without a tolerance, numbers that agree to half of their digits are equal."""
        self._effects, self._tolerance, self._noise, self._half = effects, tolerance, noise, half

    def differences(self, one: Left, other: Left) -> Iterator[Difference]:
        """Yield the differences in results, memory, gradients and generators."""
        differences = self._all_differences(one, other)
        return (each for each in differences if each.item not in self._noise.wild)

    def _all_differences(self, one: Left, other: Left) -> Iterator[Difference]:
        for label, result in one.results.items():
            yield from self._in_tree(label, label, result, other.results[label])
        yield from self._in_names(one.bound, other.bound)
        yield from self._in_memory(one.held, other.held)
        yield from self._in_gradients(one.held, other.held)
        states = zip(one.held.generators, other.held.generators, strict=True)
        for i, (state, other_state) in enumerate(states):
            if not torch.equal(state, other_state):
                name = f"the generator of {self._effects.generators[i].device}"
                yield Difference(("generator", i), name, "is at another number")

    def _in_tree(self, kind: Any, name: str, expected: Any, found: Any) -> Iterator[Difference]:
        leaves, spec = flat(expected)
        others, other_spec = flat(found)
        if spec != other_spec:
            yield Difference((kind, -1), name, f"is {spec}, and replayed {other_spec}")
            return
        pairs: list[Pair] = []
        for i, (leaf, other) in enumerate(zip(leaves, others, strict=True)):
            yield from _in_leaf((kind, i), f"{name} {i}", leaf, other, pairs)
        yield from self._unequal(pairs)

    def _in_names(self, real: Sequence[Change], replayed: Sequence[Change]) -> Iterator[Difference]:
        for one, other in zip(real, replayed, strict=True):
            kind, name = (
                ("name", one.where, one.name),
                f"{one.name}, which the function binds, leaf",
            )
            yield from self._in_tree(kind, name, _bare(one.now), _bare(other.now))

    def _in_memory(self, real: Held, replayed: Held) -> Iterator[Difference]:
        pairs = []
        for number, one, other in self._effects.pairs(real, replayed):
            tensor = self._effects.tensors[number]
            name = f"a {tuple(tensor.shape)} {tensor.dtype} tensor from outside"
            pairs.append(Pair(("memory", number), name, one, other))
        yield from self._unequal(pairs)

    def _in_gradients(self, real: Held, replayed: Held) -> Iterator[Difference]:
        pairs: list[Pair] = []
        grads = zip(self._effects.leaves, real.grads, replayed.grads, strict=True)
        for i, (leaf, one, other) in enumerate(grads):
            item = "grad", i
            name = f"grad of a {tuple(leaf.shape)} tensor"
            if one is None or other is None:
                if one is not other:
                    states = ("None", "not") if one is None else ("not None", "None")
                    yield Difference(item, name, f"is {states[0]}, and replayed {states[1]}")
            elif one is not other:
                pairs += _pairs(item, name, one, other)
        yield from self._unequal(pairs)

    def _unequal(self, pairs: Sequence[Pair]) -> Iterator[Difference]:
        """Yield the pairs that differ; small tensors are first compared in batches."""
        for batch in _batches(pairs):
            if not _same_bits(batch):
                for pair in batch:
                    if self._elements(pair).any():
                        yield Difference(pair.item, pair.name, self._first(pair))

    def _elements(self, pair: Pair) -> torch.Tensor:
        """Return a mask of the elements that differ; without a tolerance, of the bytes."""
        half = self._half or pair.item[0] in self._noise.kinds
        within = self._tolerance or (_half_of_digits(pair.one) if half else None)
        if within is None or not pair.one.is_floating_point():
            return _bytes(pair.one) != _bytes(pair.other)
        relative, absolute = within
        close = torch.isclose(pair.one, pair.other, relative, absolute, equal_nan=True)
        return ~close.reshape(-1)

    def _first(self, pair: Pair) -> str:
        unequal = self._elements(pair)
        per_element = max(1, unequal.numel() // max(1, pair.one.numel()))
        index = int(unequal.nonzero()[0]) // per_element
        real, replayed = (x.reshape(-1)[index].item() for x in (pair.one, pair.other))
        return f"differs at element {index}: {real!r}, and replayed {replayed!r}"


def _half_of_digits(x: torch.Tensor) -> Tolerance | None:
    """Return a tolerance of half the digits of the largest element."""
    if not x.is_floating_point() or not x.numel():
        return None
    largest = float(x.nan_to_num(posinf=0, neginf=0).abs().max())
    return 0.0, float(torch.finfo(x.dtype).eps ** 0.5 * largest)


def _in_leaf(
    item: Item, name: str, leaf: Any, other: Any, pairs: list[Pair]
) -> Iterator[Difference]:
    """Yield differences in type, value and layout; append tensors to compare to ``pairs``."""
    if not isinstance(leaf, torch.Tensor) or not isinstance(other, torch.Tensor):
        if not _same_value(leaf, other):
            yield Difference(item, name, f"is {leaf!r:.80}, and replayed {other!r:.80}")
    elif leaf is other:
        return  # it can be an output of a replay before, which may not be read any more
    elif _layout(leaf) != _layout(other):
        yield Difference(item, name, f"is {_layout(leaf)}, and replayed {_layout(other)}")
    else:
        pairs += _pairs(item, name, leaf, other)


def _pairs(item: Item, name: str, one: torch.Tensor, other: torch.Tensor) -> list[Pair]:
    both = zip(map(_plain, parts(one)), map(_plain, parts(other)), strict=True)
    return [Pair(item, name, a, b) for a, b in both]


def _bare(x: Any) -> Any:
    """Detach tensors: a replay binds tensors without autograd history."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, x)


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.detach().resolve_conj().resolve_neg()


def _batches(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Yield batches of pairs on one device, up to ``TOGETHER`` bytes each."""
    batch: list[Pair] = []
    nbytes = 0
    for pair in pairs:
        fits = nbytes + pair.one.nbytes <= TOGETHER
        if batch and not (fits and pair.one.device == batch[0].one.device):
            yield batch
            batch, nbytes = [], 0
        batch.append(pair)
        nbytes += pair.one.nbytes
    if batch:
        yield batch


def _same_bits(batch: Sequence[Pair]) -> bool:
    ones, others = (
        [_words(x) for x in side] for side in zip(*((p.one, p.other) for p in batch), strict=True)
    )
    if len(batch) == 1:
        return torch.equal(ones[0], others[0])
    return torch.equal(torch.cat(ones), torch.cat(others))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return local.flat(x.contiguous(), torch.uint8)


def _words(x: torch.Tensor) -> torch.Tensor:
    """Return the bits as integers of four bytes, or of one byte if the size is not a multiple."""
    data = _bytes(x)
    unaligned = data.numel() % 4 or data.storage_offset() % 4
    return data if unaligned else data.view(torch.int32)


@cache
def load_kernels(device: int) -> None:
    """Load the kernels of comparisons, once per process; this takes tens of milliseconds."""
    with torch.cuda.device(device):
        one, other = (torch.zeros(1 << 16, dtype=torch.int32, device="cuda") for _ in range(2))
        torch._foreach_copy_([one, one], [other, other])
        torch.equal(torch.cat([one, one]), torch.cat([other, other]))


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype, x.device, x.requires_grad


def _same_value(one: Any, other: Any) -> bool:
    """Return True for equal values; objects without ``__eq__`` are compared by type."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, np.ndarray):
        same = one.shape == other.shape and one.dtype == other.dtype
        return bool(same and one.tobytes() == other.tobytes())
    if isinstance(one, (float, complex, np.generic)):
        return value(one) == value(other)
    equals: Any = type(one).__eq__
    return equals is object.__eq__ or bool(one == other)
