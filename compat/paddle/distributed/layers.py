"""Layers whose weight is split over the tensor-parallel group: ``fleet.layers.mpu.mp_layers``.

Weights have upstream's layout, [in, out]. Each rank draws its part from the tracked generator state
(``get_rng_state_tracker``), so the parts differ. ``mp_group=None`` is the tensor-parallel group of
``fleet.init``. A weight that is split has ``is_distributed = True`` and ``split_axis``; a deep copy
of a layer loses both marks, which torch does not copy, and keeps ``layer.split_axes``.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional

from commlib.compat.paddle.distributed import mp_ops
from commlib.compat.paddle.distributed.groups import Group
from commlib.compat.paddle.distributed.hybrid_group import hybrid_group
from commlib.compat.paddle.distributed.rng_states import get_rng_state_tracker
from commlib.errors import ArgumentError, ShapeError

Tensor = torch.Tensor
Initializer = Callable[[Tensor], Any]


class _ParallelLayer(torch.nn.Module):
    """A layer with a tensor-parallel group.

    Attributes:
        name: The argument ``name``.
        split_axes: The axis of each parameter that is split, by its name.
    """

    def __init__(self, mp_group: Group | None, name: object) -> None:
        super().__init__()
        self.name = name
        group = hybrid_group().get_model_parallel_group() if mp_group is None else mp_group
        self.model_parallel_group = group
        self.world_size, self.rank = group.ring.size, group.ring.rank
        self.is_mp = self.world_size > 1
        self.split_axes: dict[str, int] = {}

    def _part(self, what: str, length: int) -> int:
        """Return this rank's share of ``length``."""
        if length % self.world_size:
            raise ShapeError(
                f"{type(self).__name__} on {self.model_parallel_group.ring!r}: {what}={length}; "
                f"expected a multiple of the {self.world_size} ranks; pad it"
            )
        return length // self.world_size

    def _weight(
        self, shape: tuple[int, int], initializer: Initializer | None, split_axis: int
    ) -> torch.nn.Parameter:
        """Return a new weight; ``initializer`` fills a tensor in place."""
        if not (initializer is None or callable(initializer)):
            raise ArgumentError(
                f"{type(self).__name__}: weight_attr={initializer!r}; expected a function that "
                f"fills a tensor in place, such as torch.nn.init.xavier_uniform_, or None"
            )
        weight = torch.nn.Parameter(
            torch.empty(shape, device=self.model_parallel_group.ring.device)
        )
        drawing = get_rng_state_tracker().rng_state() if self.is_mp else nullcontext()
        with drawing, torch.no_grad():
            (initializer or torch.nn.init.xavier_uniform_)(weight)
        return self._marked("weight", weight, split_axis)

    def _bias(self, length: int, split_axis: int | None = None) -> torch.nn.Parameter:
        """Return a new bias of zeros."""
        zeros = torch.zeros(length, device=self.model_parallel_group.ring.device)
        return self._marked("bias", torch.nn.Parameter(zeros), split_axis)

    def _marked(self, name: str, parameter: Any, split_axis: int | None) -> torch.nn.Parameter:
        parameter.is_distributed = self.is_mp and split_axis is not None
        if self.is_mp and split_axis is not None:
            parameter.split_axis = self.split_axes[name] = split_axis
        marked: torch.nn.Parameter = parameter
        return marked


def split_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that differ between tensor-parallel ranks.

    They are those of the parallel layers, and those that a program has given a ``split_axis``.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _ParallelLayer)]
    of_layers = [
        one
        for layer in layers
        for name, one in layer.named_parameters(recurse=False)
        if name in layer.split_axes
    ]
    return [*of_layers, *(one for one in model.parameters() if hasattr(one, "split_axis"))]


class VocabParallelEmbedding(_ParallelLayer):
    """An embedding whose rows are split: rank r has the r-th part of the ids."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        weight_attr: Initializer | None = None,
        mp_group: Group | None = None,
        name: object = None,
    ) -> None:
        """Create the rows of this rank.

        Args:
            num_embeddings: Number of ids, a multiple of the group's size.
            embedding_dim: Width of a row.
            weight_attr: Fills the weight in place. Default: ``torch.nn.init.xavier_uniform_``.
            mp_group: See the module.
            name: Kept as an attribute, without effect.

        Raises:
            ShapeError: The group's size does not divide ``num_embeddings``.
            ArgumentError: There is no group, or ``weight_attr`` is not a function.
        """
        super().__init__(mp_group, name)
        rows = self._part("num_embeddings", num_embeddings)
        self.vocab_start_index = self.rank * rows
        self.num_embeddings = self.origin_num_embeddings = num_embeddings
        self.weight = self._weight((rows, embedding_dim), weight_attr, 0)

    def forward(self, x: Tensor) -> Any:
        """Return the rows of the ids ``x``, [..., embedding_dim], on every rank."""
        rows = mp_ops._c_lookup_table(self.weight, x, self.vocab_start_index, self.num_embeddings)
        return mp_ops._mp_allreduce(rows, group=self.model_parallel_group)


class ColumnParallelLinear(_ParallelLayer):
    """A linear layer whose columns are split: rank r computes the r-th part of the outputs."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Initializer | None = None,
        has_bias: bool | None = None,
        gather_output: bool = True,
        fuse_matmul_bias: bool = False,
        mp_group: Group | None = None,
        name: object = None,
    ) -> None:
        """Create the columns of this rank.

        Args:
            in_features: Number of inputs.
            out_features: Number of outputs, a multiple of the group's size.
            weight_attr: Fills the weight in place. Default: ``torch.nn.init.xavier_uniform_``.
            has_bias: True adds a bias of zeros.
            gather_output: True returns all outputs on every rank, False this rank's part.
            fuse_matmul_bias: Kept, without effect: torch adds the bias in the product.
            mp_group: See the module.
            name: Kept as an attribute, without effect.

        Raises:
            ShapeError: The group's size does not divide ``out_features``.
            ArgumentError: There is no group, or ``weight_attr`` is not a function.
        """
        super().__init__(mp_group, name)
        self.gather_output, self.fuse_matmul_bias = gather_output, fuse_matmul_bias
        self.output_size_per_partition = columns = self._part("out_features", out_features)
        self.weight = self._weight((in_features, columns), weight_attr, 1)
        self.bias = self._bias(columns, 0) if has_bias else None

    def forward(self, x: Tensor) -> Any:
        """Return [..., out_features], or this rank's part of it. ``x``: the same on every rank."""
        same: Any = mp_ops._c_identity(x, self.model_parallel_group)
        shard = functional.linear(same, self.weight.t(), self.bias)
        return mp_ops._c_concat(shard, self.model_parallel_group) if self.gather_output else shard


class RowParallelLinear(_ParallelLayer):
    """A linear layer whose rows are split: rank r takes the r-th part of the inputs."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Initializer | None = None,
        has_bias: bool = True,
        input_is_parallel: bool = False,
        fuse_matmul_bias: bool = False,
        mp_group: Group | None = None,
        name: object = None,
    ) -> None:
        """Create the rows of this rank.

        Args:
            in_features: Number of inputs, a multiple of the group's size.
            out_features: Number of outputs.
            weight_attr: Fills the weight in place. Default: ``torch.nn.init.xavier_uniform_``.
            has_bias: True adds a bias of zeros, after the sum; it is whole on every rank.
            input_is_parallel: True takes this rank's part of the inputs, False all of them.
            fuse_matmul_bias: Kept, without effect: the bias is added once, after the sum.
            mp_group: See the module.
            name: Kept as an attribute, without effect.

        Raises:
            ShapeError: The group's size does not divide ``in_features``.
            ArgumentError: There is no group, or ``weight_attr`` is not a function.
        """
        super().__init__(mp_group, name)
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel, self.fuse_matmul_bias = input_is_parallel, fuse_matmul_bias
        self.input_size_per_partition = rows = self._part("in_features", in_features)
        self.weight = self._weight((rows, out_features), weight_attr, 0)
        self.bias = self._bias(out_features) if has_bias else None

    def forward(self, x: Tensor) -> Any:
        """Return [..., out_features] on every rank."""
        shard: Any = x if self.input_is_parallel else mp_ops._c_split(x, self.model_parallel_group)
        total: Any = mp_ops._mp_allreduce(shard @ self.weight, group=self.model_parallel_group)
        return total if self.bias is None else total + self.bias


class ParallelCrossEntropy(_ParallelLayer):
    """The cross-entropy of logits whose classes are split over the group."""

    def __init__(
        self, mp_group: Group | None = None, name: object = None, ignore_index: int = -100
    ) -> None:
        """Choose the group and the label that does not count.

        Args:
            mp_group: See the module.
            name: Kept as an attribute, without effect.
            ignore_index: Label whose loss and gradient are 0.

        Raises:
            ArgumentError: There is no group.
        """
        super().__init__(mp_group, name)
        self.ignore_index = ignore_index

    def forward(self, input: Tensor, label: Tensor) -> Any:
        """Return the loss, [..., 1], of logits [..., D] and class ids [...] or [..., 1]."""
        return mp_ops._c_softmax_with_cross_entropy(
            input, label, self.model_parallel_group, ignore_index=self.ignore_index
        )
