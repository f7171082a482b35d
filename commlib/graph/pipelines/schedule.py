"""`PipelineSchedule`: the order of the actions of each rank, and the moves between ranks."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from typing_extensions import Self

from commlib.errors import GraphError
from commlib.graph.calls.graph_break import REPLAYS, graph_break
from commlib.graph.pipelines.actions import Action, Kind, PipelineMove, action_of, following, needs
from commlib.graph.pipelines.edges import Edges
from commlib.graph.pipelines.orders import orders_of
from commlib.graph.pipelines.step import Loss, PipelineStep, Transport


class PipelineSchedule:
    """The order of the actions of each rank, checked when the schedule is made.

    Attributes:
        orders: The actions of each rank.
        ranks: The rank of each stage.
    """

    def __init__(self, orders: Sequence[Sequence[tuple[Kind, int, int]]]) -> None:
        """Check a schedule.

        Args:
            orders: The actions of each rank, in order: (kind, stage, microbatch) with the kind
                "forward" or "backward".
                A stage is on one rank.

        Raises:
            GraphError: An action is missing, comes twice, or could never run.
        """
        self.orders = [[action_of(each) for each in order] for order in orders]
        self.ranks = _ranks(self.orders)
        _check_complete(self.orders, len(self.ranks))
        self._ticks = _ticks(self.orders, len(self.ranks))

    @classmethod
    def gpipe(cls, ranks: int, microbatches: int, *, chunks: int = 1) -> Self:
        """Return all forwards before all backwards. Arguments: as ``one_f_one_b``."""
        return cls(orders_of(ranks, microbatches, chunks, ranks * microbatches * chunks))

    @classmethod
    def one_f_one_b(cls, ranks: int, microbatches: int, *, chunks: int = 1) -> Self:
        """Return a schedule that runs a backward as soon as it can.

        Args:
            ranks: Ranks of the pipeline, 1 or more.
            microbatches: Any number, 1 or more.
            chunks: Stages per rank. Stage s is on rank ``s % ranks``: 2 or more is the interleaved
                schedule of virtual stages.
        """
        return cls(orders_of(ranks, microbatches, chunks, None))

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.ranks)

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches."""
        return 1 + max(action.microbatch for order in self.orders for action in order)

    def steps(self, rank: int) -> list[Action | PipelineMove]:
        """Return the actions of a rank, and the moves that it takes part in, in order.

        All ranks make their moves in one common order. A send may therefore block until its
        receive is posted, on any transport.

        Args:
            rank: A rank of the schedule, from 0.

        Raises:
            GraphError: There is no such rank.
        """
        if rank not in range(len(self.orders)):
            raise GraphError(f"rank={rank!r}: expected 0 to {len(self.orders) - 1}")
        steps: list[Action | PipelineMove] = []
        for actions in self._ticks:
            steps += [action for at, action in actions if at == rank]
            moves = [move for _, action in actions for move in self._moves(action)]
            steps += [move for move in moves if rank in (move.source, move.target)]
        return steps

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """Return the ranks between which something passes, (source, target), sorted."""
        actions = [action for order in self.orders for action in order]
        moves = [move for action in actions for move in self._moves(action)]
        return sorted({(move.source, move.target) for move in moves})

    def connect(
        self,
        ring_id: int,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        ranks: Sequence[int] | None = None,
    ) -> Edges:
        """Create and connect one ring per directed edge; every rank of ``ranks`` calls it.

        A ring sends in one direction only, so that no send waits for a receive of another edge. A
        step that uses the edges can be captured whole, because all of them are connected now.
        Blocks the host until the neighbours have called it, at most their rings' timeout.

        Args:
            ring_id: Number of the first ring; the others follow in the order of ``edges``.
            shape: Shape of the activations of one microbatch, and of their gradients.
            dtype: Their dtype.
            ranks: Global rank of each rank of the schedule. None: 0, 1, 2, ...

        Returns:
            A transport for ``run``.

        Raises:
            GraphError: ``shape`` or ``ranks`` is wrong.
        """
        if not isinstance(shape, Sequence):
            raise GraphError(f"shape={shape!r:.60}: expected the sizes of an activation, (4, 16)")
        members = [*range(len(self.orders))] if ranks is None else [*ranks]
        if len(members) != len(self.orders):
            raise GraphError(f"ranks={members}: expected {len(self.orders)}, one per rank")
        return Edges(self.edges, members, ring_id, tuple(shape), dtype)

    @graph_break(REPLAYS)
    def run(
        self,
        stages: Mapping[int, Callable[[torch.Tensor], torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        loss: Loss,
        transport: Transport,
    ) -> list[torch.Tensor]:
        """Run this rank's part of one step; gradients add up in the parameters.

        Args:
            stages: All stages of this rank by their numbers.
            inputs: What the first stage gets, one per microbatch; ranks without the first stage
                pass as many tensors, whose values are not used.
            loss: Called as ``loss(output of the last stage, microbatch)``. Divide by the number of
                microbatches inside for a mean.
            transport: Moves tensors between ranks: what ``connect`` returns, or an object with the
                methods ``send(x, move)`` and ``receive(move)``.

        Returns:
            The losses by microbatch on the rank of the last stage, detached; elsewhere nothing.

        Raises:
            GraphError: The stages are not those of one rank, or the inputs are not one per
                microbatch. A stage or the loss that returns what no schedule can pass on raises it
                too.
        """
        rank = self._rank_of(stages)
        if len(inputs) != self.microbatches:
            raise GraphError(
                f"{len(inputs)} inputs; expected one per microbatch, {self.microbatches}"
            )
        steps = self.steps(rank)
        if any(isinstance(x, PipelineMove) for x in steps) and not hasattr(transport, "receive"):
            raise GraphError(
                f"transport={transport!r:.60}: rank {rank} exchanges tensors with others; expected "
                f"what connect() returns, or an object with the methods send and receive"
            )
        step = PipelineStep(stages, inputs, loss, self.stages - 1)
        for each in steps:
            if isinstance(each, Action):
                step.run(each)
            elif each.source == rank:
                step.send(each, transport)
            else:
                step.receive(each, transport)
        return step.finish()

    def _rank_of(self, stages: Mapping[int, Any]) -> int:
        """Return the rank that has exactly these stages."""
        for rank in range(len(self.orders)):
            if sorted(stages) == [s for s in range(self.stages) if self.ranks[s] == rank]:
                return rank
        raise GraphError(
            f"stages {sorted(stages)}: expected all stages of one rank, which are by stage "
            f"{self.ranks}"
        )

    def _moves(self, action: Action) -> list[PipelineMove]:
        """Return what leaves the rank after an action: nothing, or one tensor."""
        use = following(action)
        if not 0 <= use.stage < self.stages:
            return []
        source, target = self.ranks[action.stage], self.ranks[use.stage]
        return [PipelineMove(source, target, use)] if source != target else []


def _ranks(orders: Sequence[Sequence[Action]]) -> list[int]:
    """Return the rank of each stage."""
    ranks: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if ranks.setdefault(action.stage, rank) != rank:
                raise GraphError(
                    f"stage {action.stage} has actions on ranks {ranks[action.stage]} and {rank}; "
                    f"expected one rank per stage"
                )
    if sorted(ranks) != [*range(len(ranks))] or not ranks:
        raise GraphError(f"the schedule has stages {sorted(ranks)}; expected 0, 1, 2, ...")
    return [ranks[stage] for stage in range(len(ranks))]


def _check_complete(orders: Sequence[Sequence[Action]], stages: int) -> None:
    """Raise unless each microbatch runs once forward and once back through each stage."""
    counts = Counter(action for order in orders for action in order)
    numbers = {action.microbatch for action in counts}
    for number in range(max(len(numbers), max(numbers) + 1)):
        for stage in range(stages):
            for kind in ("forward", "backward"):
                action = Action(kind, stage, number)
                if (count := counts.pop(action, 0)) != 1:
                    raise GraphError(f"the {action} comes {count} times; expected once")
    if counts:
        raise GraphError(f"unknown action: {next(iter(counts))}; expected kind forward or backward")


def _ticks(orders: Sequence[Sequence[Action]], stages: int) -> list[list[tuple[int, Action]]]:
    """Return the actions that run at the same time, with their ranks, one tick after the other."""
    done: set[Action] = set()
    left = [[*reversed(order)] for order in orders]
    ticks = []
    while any(left):
        tick = [
            (rank, order[-1])
            for rank, order in enumerate(left)
            if order and done.issuperset(needs(order[-1], stages))
        ]
        if not tick:
            stuck = [
                f"the {order[-1]} on rank {rank} waits for the "
                f"{next(x for x in needs(order[-1], stages) if x not in done)}"
                for rank, order in enumerate(left)
                if order
            ]
            raise GraphError(f"this schedule can't run to its end: {'; '.join(stuck)}")
        for rank, action in tick:
            left[rank].pop()
            done.add(action)
        ticks.append(tick)
    return ticks
