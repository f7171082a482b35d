"""What an engine implements for a ring, and how a verb comes to its launch."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from commlib.core.ring import Ring
from commlib.core.validation import check_out, check_pair, check_position, check_tensor, misfit
from commlib.core.work import All, Pending
from commlib.engines.reductions import Reducer, Wire, wire
from commlib.errors import ArgumentError
from commlib.p2p.routes import Routes

if TYPE_CHECKING:
    from commlib.p2p.fused_norm import Norm

Tensor = torch.Tensor


class EngineRing(Ring):
    """A ring whose collectives an engine carries: NCCL, gloo, or ``torch.distributed``.

    Launches take dense tensors and run on the current stream. They return None where the stream
    orders the result, else an object with ``wait()`` and ``is_completed()``.
    """

    reducer: ClassVar[Reducer]
    # Whether the engine takes x inside out (all_gather) and out inside x (reduce_scatter).
    parts_in_place: ClassVar[bool] = False

    def __init__(self, *place: Any) -> None:
        """Take the place in the ring that ``Ring`` describes."""
        self._reductions: dict[tuple[torch.dtype, str], Any] = {}
        super().__init__(*place)

    # -- the way to a launch -----------------------------------------------------------------------

    def _reduction(self, verb: str, x: Tensor, op: str, factor: float | None = None) -> Any:
        """The reduction in the engine's own terms, resolved once for each dtype and op."""
        known = None if factor is not None else self._reductions.get((x.dtype, op))
        if known is not None:
            return known
        try:
            reduction = wire(x.dtype, op, self.reducer, factor)
        except ArgumentError as error:
            raise type(error)(f"{self.where(verb)}: {error}") from None
        resolved = reduction if self.size == 1 else self._resolve(x.dtype, reduction)
        if factor is None:  # factors are without number, so they are not kept
            self._reductions[x.dtype, op] = resolved
        return resolved

    def _resolve(self, dtype: torch.dtype, reduction: Wire) -> Any:
        """The engine's form of ``reduction`` over ``dtype``; what its launches are given."""
        return reduction

    def _pick(self, launch: Any, count: int) -> Any:
        """The engine's launch, or a local one where no bytes have to move between ranks."""
        if count and self.size > 1:
            return launch
        return self._alone if self.size == 1 else self._nothing

    def _at_root(self, verb: str, root: int, out: Tensor | None, x: Tensor) -> Tensor | None:
        """The output where it counts; ranks other than ``root`` do not touch theirs."""
        check_position(self, verb, "root", root)
        if self.rank != root:
            check_tensor(self, verb, "x", x)
            return None
        check_pair(self, verb, out, x)  # type: ignore[arg-type]  # None is refused there
        return out

    def _from_root(
        self, verb: str, root: int, out: Tensor, x: Tensor | None, parts: int
    ) -> Tensor | None:
        """The input where it counts, ``parts`` times the size of ``out``.

        Ranks other than ``root`` do not read theirs; if they give one, it must fit all the same.
        """
        check_position(self, verb, "root", root)
        if x is None and self.rank != root:
            check_out(self, verb, out)
            return None
        check_pair(self, verb, out, x)  # type: ignore[arg-type]  # None is refused there
        count = x.numel()  # type: ignore[union-attr]
        if out.numel() * parts != count:
            raise misfit(self, verb, out, count / parts, f"x.numel() / {parts}")
        return x if self.rank == root else None

    def _alone(self, out: Tensor | None, x: Tensor | None, *args: Any) -> None:
        """A ring of one rank: every collective is the identity."""
        if out is None or x is None:
            return
        if out.data_ptr() != x.data_ptr():
            out.view(-1).copy_(x.view(-1))
        if args and isinstance(args[-1], Wire) and args[-1].factor != 1.0:
            out.mul_(args[-1].factor)

    @staticmethod
    def _nothing(out: Tensor | None, x: Tensor | None, *args: Any) -> None:
        """Empty tensors: there is nothing to move, on any rank."""
        return

    def _prepare_rows(self) -> None:
        """Set up what ``exchange_rows`` needs; called outside the issue lock."""

    def _own_rows(self, out: Tensor, x: Tensor, routes: Routes) -> None:
        """Copy the rows that this rank has for itself."""
        for s in routes.sends[routes.sends["peer"] == self.rank]:
            if s["rows"]:
                _rows(out, s, "target").copy_(_rows(x, s, "start"))

    def _exchange_rows(self, out: Tensor, x: Tensor, routes: Routes) -> Any:
        """One group of sends and receives, a pair for each segment."""
        under_way = []
        with self.coalesced():
            for s in routes.sends:
                if s["peer"] != self.rank and s["rows"]:
                    under_way.append(self._send(None, _rows(x, s, "start"), int(s["peer"])))
            for t in routes.takes:
                if t["peer"] != self.rank and t["rows"]:
                    under_way.append(self._recv(_rows(out, t, "target"), None, int(t["peer"])))
        self._own_rows(out, x, routes)
        handles = [handle for handle in under_way if handle is not None]
        return All(handles) if handles else None

    def _carrier(self, nbytes: int, reduction: Wire) -> str:
        """What carries an all_reduce of so many bytes, and why."""
        return f"{self.engine}: its own {reduction.op} of {reduction.dtype}, at any size"

    # -- launches ----------------------------------------------------------------------------------

    @abstractmethod
    def _all_reduce(self, out: Tensor, x: Tensor, reduction: Any) -> Any: ...

    @abstractmethod
    def _all_gather(self, out: Tensor, x: Tensor) -> Any: ...

    @abstractmethod
    def _reduce_scatter(self, out: Tensor, x: Tensor, reduction: Any) -> Any: ...

    @abstractmethod
    def _broadcast(self, out: Tensor, x: Tensor | None, root: int) -> Any: ...

    @abstractmethod
    def _reduce(self, out: Tensor | None, x: Tensor, root: int, reduction: Any) -> Any: ...

    @abstractmethod
    def _gather(self, out: Tensor | None, x: Tensor, root: int) -> Any: ...

    @abstractmethod
    def _scatter(self, out: Tensor, x: Tensor | None, root: int) -> Any: ...

    def _fused(self, x: Tensor, norm: "Norm") -> tuple[Any, Any] | None:
        """What launches ``all_reduce_norm``, and its plan; None where there is no kernel."""
        return None

    def _begin(self, out: Tensor, x: Tensor, reduction: Any) -> Pending | None:
        """Launch the first half of an all_reduce, or nothing where it has no halves."""
        return None

    @abstractmethod
    def _all_to_all(self, out: Tensor, x: Tensor, takes: list[int], sends: list[int]) -> Any: ...

    def _equal_parts(self, out: Tensor, x: Tensor, takes: list[int], sends: list[int]) -> Any:
        """Do an all_to_all that no member has given splits to."""
        return self._all_to_all(out, x, takes, sends)

    @abstractmethod
    def _send(self, out: None, x: Tensor, peer: int) -> Any: ...

    @abstractmethod
    def _recv(self, out: Tensor, x: None, peer: int) -> Any: ...

    @abstractmethod
    def _barrier(self, out: None, x: None) -> Any: ...


def _rows(x: Tensor, segment: Any, first: str) -> Tensor:
    return x.narrow(0, int(segment[first]), int(segment["rows"]))
