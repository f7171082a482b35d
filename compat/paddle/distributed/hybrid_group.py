"""This process's groups in hybrid parallelism, each with a ring."""

from collections.abc import Sequence

from commlib.compat.paddle.distributed.environment import ParallelMode, get_rank, get_world_size
from commlib.compat.paddle.distributed.groups import Group, at_end, new_group
from commlib.compat.paddle.distributed.topology import CommunicateTopology
from commlib.errors import ArgumentError

_REPLICAS = ("data", "sharding", "sep")
_FUSED = (("data", "sep"), ("pipe", "model"))


class HybridCommunicateGroup:
    """This process's groups along every axis of a topology, each with a ring.

    All processes create it. An axis of length 1 has groups of one rank, whose rings need no
    communicator.

    Attributes:
        nranks: Number of processes.
        global_rank: This process's global rank.
        stage_id: Its pipeline stage.
        is_first_stage, is_last_stage: Whether the stage is the first or the last one.
    """

    def __init__(self, topology: CommunicateTopology) -> None:
        """Create the rings and become the group that parallel layers use.

        Args:
            topology: Its axes are some of "data", "pipe", "sharding", "sep" and "model".

        Raises:
            ArgumentError: It has another number of ranks than the program.
            CommError: As ``new_group``.
        """
        self.nranks, self.global_rank = get_world_size(), get_rank()
        if topology.world_size() != self.nranks:
            names = topology.get_hybrid_group_names()
            dims = {name: topology.get_dim(name) for name in names}
            raise ArgumentError(
                f"HybridCommunicateGroup on rank {self.global_rank}: the degrees {dims} give "
                f"{topology.world_size()} ranks; expected {self.nranks}, the ranks of the program; "
                f"pass degrees whose product is {self.nranks}"
            )
        self._topology, self._place = topology, topology.get_coord(self.global_rank)
        self._groups = {
            name: self._own(topology.get_comm_list(name))
            for name in topology.get_hybrid_group_names()
        }
        self._check_groups: dict[str, Group] = {
            name: self._own(
                [topology.get_axis_list(name, i) for i in range(topology.get_dim(name))]
            )
            for name in ("data", "sharding")
            if name in self._groups
        }
        self._fused = {axes: self._fuse(axes) for axes in _FUSED if self._degree("sep") > 1}
        self._p2p_groups: tuple[Group, ...] = ()
        self.stage_id, stages = self._position("pipe"), self._degree("pipe")
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == stages - 1
        _current.group = self

    def _own(self, lists: list[list[int]]) -> Group:
        """Create all groups of ``lists``, as every process does, and return this process's."""
        groups = [new_group(ranks) for ranks in lists]
        return next(group for group in groups if group.rank >= 0)

    def _fuse(self, axes: tuple[str, ...]) -> Group:
        """Create the groups over those of ``axes`` that the topology has."""
        present = [axis for axis in axes if axis in self._groups]
        return self._own(sorted(self._topology.get_fused_ranks(present)))

    def _group(self, axis: str) -> Group:
        """Return this process's group along an axis that the topology has."""
        self._topology.get_dim(axis)  # raises for another one
        return self._groups[axis]

    def _degree(self, axis: str) -> int:
        return self._groups[axis].nranks if axis in self._groups else 1

    def _position(self, axis: str) -> int:
        return int(getattr(self._place, axis, 0))

    def replica_groups(self) -> list[Group]:
        """Return the groups, of two ranks or more, whose members have the same weights."""
        groups = [self._groups[axis] for axis in _REPLICAS if axis in self._groups]
        return [group for group in groups if group.nranks > 1]

    def topology(self) -> CommunicateTopology:
        """Return the topology."""
        return self._topology

    def get_parallel_mode(self) -> int:
        """Return a number of ``ParallelMode``: pipeline before tensor, before the others."""
        modes = {
            "pipe": ParallelMode.PIPELINE_PARALLEL,
            "model": ParallelMode.TENSOR_PARALLEL,
            "sep": ParallelMode.SEGMENT_PARALLEL,
            "sharding": ParallelMode.SHARDING_PARALLEL,
        }
        used = [mode for axis, mode in modes.items() if self._degree(axis) > 1]
        return used[0] if used else ParallelMode.DATA_PARALLEL

    def get_global_rank(self) -> int:
        """Return this process's global rank."""
        return self.global_rank

    def get_rank_from_stage(self, stage_id: int, **kwargs: int) -> int:
        """Return the global rank at another stage, with this process's other positions."""
        return self._topology.get_rank_from_stage(self.global_rank, pipe=stage_id, **kwargs)

    def get_check_parallel_group(self, sharding: bool = False) -> Group:
        """Return the group of the ranks with this position on the data (or sharding) axis."""
        axis = "sharding" if sharding else "data"
        self._topology.get_dim(axis)  # raises if it has no such axis
        return self._check_groups[axis]

    def get_stage_id(self) -> int:
        """Return this process's pipeline stage."""
        return self.stage_id

    def _get_p2p_next_rank(self) -> int:
        return self.get_rank_from_stage((self.stage_id + 1) % self._degree("pipe"))

    def _get_p2p_prev_rank(self) -> int:
        return self.get_rank_from_stage((self.stage_id - 1) % self._degree("pipe"))

    def get_data_parallel_rank(self) -> int:
        """Return this process's position on the data axis."""
        return self._position("data")

    def get_data_parallel_world_size(self) -> int:
        """Return the length of the data axis."""
        return self._degree("data")

    def get_data_parallel_group(self) -> Group:
        """Return this process's group along the data axis."""
        return self._group("data")

    def get_data_parallel_group_src_rank(self) -> int:
        """Return the first global rank of that group."""
        return self._group("data").ranks[0]

    def get_model_parallel_rank(self) -> int:
        """Return this process's position on the model axis."""
        return self._position("model")

    def get_model_parallel_world_size(self) -> int:
        """Return the length of the model axis."""
        return self._degree("model")

    def get_model_parallel_group(self) -> Group:
        """Return this process's group along the model axis."""
        return self._group("model")

    def get_model_parallel_group_src_rank(self) -> int:
        """Return the first global rank of that group."""
        return self._group("model").ranks[0]

    def get_sharding_parallel_rank(self) -> int:
        """Return this process's position on the sharding axis."""
        return self._position("sharding")

    def get_sharding_parallel_world_size(self) -> int:
        """Return the length of the sharding axis."""
        return self._degree("sharding")

    def get_sharding_parallel_group(self) -> Group:
        """Return this process's group along the sharding axis."""
        return self._group("sharding")

    def get_sharding_parallel_group_src_rank(self) -> int:
        """Return the first global rank of that group."""
        return self._group("sharding").ranks[0]

    def get_sep_parallel_rank(self) -> int:
        """Return this process's position on the sep axis."""
        return self._position("sep")

    def get_sep_parallel_world_size(self) -> int:
        """Return the length of the sep axis."""
        return self._degree("sep")

    def get_sep_parallel_group(self) -> Group:
        """Return this process's group along the sep axis."""
        return self._group("sep")

    def get_sep_parallel_group_src_rank(self) -> int:
        """Return the first global rank of that group."""
        return self._group("sep").ranks[0]

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of pipeline stages."""
        return self._degree("pipe")

    def get_pipe_parallel_group(self) -> Group:
        """Return this process's group along the pipe axis."""
        return self._group("pipe")

    def get_dp_sep_parallel_group(self) -> Group:
        """Return this process's group over the data and sep axes.

        Raises:
            ArgumentError: The sep axis is not above 1.
        """
        return self._fused_group(("data", "sep"))

    def get_pp_mp_parallel_group(self) -> Group:
        """Return this process's group over the pipe and model axes.

        Raises:
            ArgumentError: The sep axis is not above 1.
        """
        return self._fused_group(("pipe", "model"))

    def _fused_group(self, axes: tuple[str, str]) -> Group:
        if axes not in self._fused:
            raise ArgumentError(
                f"HybridCommunicateGroup on rank {self.global_rank}: groups over {axes} exist with "
                f"a sep axis above 1 alone; pass a sep_degree above 1, or call "
                f"create_fuse_group({list(axes)})"
            )
        return self._fused[axes]

    def create_fuse_group(
        self, fused_strategy_list: Sequence[str], nccl_config: object = None
    ) -> tuple[list[int], Group]:
        """Create the groups over several axes; return this process's ranks and group.

        All processes call it.

        Args:
            fused_strategy_list: Names of axes, one or more.
            nccl_config: Ignored.

        Raises:
            ArgumentError: There is not an axis, or an axis is unknown.
        """
        if not fused_strategy_list:
            raise ArgumentError("create_fuse_group: fused_strategy_list=[]; expected names of axes")
        lists = sorted(self._topology.get_fused_ranks(fused_strategy_list))
        my_ranks = next(ranks for ranks in lists if self.global_rank in ranks)
        return my_ranks, self._own(lists)

    def get_p2p_groups(self) -> tuple[Group, ...]:
        """Return the pairs of stages to send to the next and previous, and to receive from them.

        All processes make the first call, which creates the groups.

        Raises:
            ArgumentError: The pipe axis has one stage.
        """
        if self._degree("pipe") < 2:
            raise ArgumentError("get_p2p_groups: one stage; expected a pipe axis above 1")
        if not self._p2p_groups:
            self._p2p_groups = tuple(self._pairs())
        return self._p2p_groups

    def _pairs(self) -> list[Group]:
        """Create the groups of ``get_p2p_groups``: each pair of stages has one per direction."""
        groups: dict[tuple[str, str], Group] = {}
        for ranks in self._topology.get_comm_list("pipe"):
            for rank, after in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
                for forward in (True, False):
                    group = new_group([rank, after])
                    sender, receiver = (rank, after) if forward else (after, rank)
                    if self.global_rank == sender:
                        groups["send", "next" if forward else "previous"] = group
                    if self.global_rank == receiver:
                        groups["receive", "previous" if forward else "next"] = group
        sides = ("next", "previous")
        return [groups[action, side] for action in ("send", "receive") for side in sides]


class _Current:
    """The hybrid group that was created last."""

    group: HybridCommunicateGroup | None = None

    def forget(self) -> None:
        self.group = None


_current = _Current()
at_end(_current.forget)


def hybrid_group() -> HybridCommunicateGroup:
    """Return the hybrid group that was created last.

    Raises:
        ArgumentError: There is none.
    """
    if _current.group is None:
        raise ArgumentError(
            "there is no hybrid group; call fleet.init(is_collective=True, strategy=strategy) "
            "first, or pass mp_group= to a parallel layer"
        )
    return _current.group
