"""Legacy pipelines: PipelineLayer with its descriptions of layers."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from commlib.compat.paddle.checks import ring_of
from commlib.compat.paddle.moves import c_broadcast
from commlib.compat.paddle.reductions import c_allreduce_sum
from commlib.core.context import CommContext
from commlib.core.rings.opening import new_ring
from commlib.errors import ArgumentError
from commlib.graph.pipelines.layers import Layers
from commlib.graph.pipelines.pipeline import pipeline


class LayerDesc:
    """A layer that is built on the rank of its stage only."""

    def __init__(self, layer_func: Callable[..., Any], *inputs: Any, **kwargs: Any) -> None:
        """Keep ``layer_func``, a class or function, and the arguments that it is built with."""
        if not callable(layer_func):
            raise ArgumentError(f"LayerDesc: layer_func={layer_func!r}; expected a class")
        self.layer_func, self.inputs, self.kwargs = layer_func, inputs, kwargs

    def build_layer(self) -> Any:
        """Return a new layer, which ``layer_func`` builds."""
        return self.layer_func(*self.inputs, **self.kwargs)


class SharedLayerDesc(LayerDesc):
    """A layer with a weight that several stages share, such as tied embeddings."""

    def __init__(
        self,
        key: str,
        layer_func: Callable[..., Any],
        forward_func: Callable[[Any, Any], Any] | None = None,
        shared_weight_attr: str = "weight",
        *inputs: Any,
        **kwargs: Any,
    ) -> None:
        """Describe one use of a shared layer.

        Args:
            key: Name of what is shared: descriptions with one key share it.
            layer_func: Class or function that builds the layer.
            forward_func: Called with the layer and the input in place of the layer.
            shared_weight_attr: Attribute of the layer that is the shared weight.
            *inputs, **kwargs: Arguments of ``layer_func``.
        """
        super().__init__(layer_func, *inputs, **kwargs)
        self.layer_name, self.forward_func = key, forward_func
        self.shared_weight_attr = shared_weight_attr


class PipelineLayer(torch.nn.Module):
    """This rank's stages of a model that is a list of layers.

    Source: ``fleet.meta_parallel.PipelineLayer``. With ``use_cudagraph=True`` each stage is a
    ``graph.pipeline``: neighbouring layers are captured together, around shared layers.

    Attributes:
        chunks: The stages of this rank. Stage ``chunk * num_stages + rank`` is number ``chunk``.
        shared_layers: The shared layers of this rank by key.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        seg_method: str | Sequence[int] = "uniform",
        recompute_interval: int = 0,
        recompute_ctx: object = None,
        num_virtual_pipeline_stages: int | None = None,
        use_cudagraph: bool = False,
        *,
        ring_id: int = 0,
        shared_ring_id: int = 1 << 20,
    ) -> None:
        """Build this rank's layers; every rank of the ring calls it.

        Args:
            layers: ``LayerDesc``, ``SharedLayerDesc``, modules or functions of the whole model.
            num_stages: Ranks of the pipeline: the size of the ring.
            topology: Its "pipe" dimension is the same number.
            loss_fn: Kept as ``loss_fn``.
            seg_method: "uniform"; "layer:Name" for as many layers in each stage whose class name
                contains ``Name``; or the position of each stage's first layer, and the number of
                layers.
            recompute_interval: Must be 0.
            recompute_ctx: Ignored.
            num_virtual_pipeline_stages: Stages per rank (1).
            use_cudagraph: Capture the stages.
            ring_id: Ring of the pipeline's ranks.
            shared_ring_id: Number of the first ring of ranks that share a layer.

        Raises:
            ArgumentError: An argument is wrong.
        """
        super().__init__()
        self._ring = ring_of("PipelineLayer", ring_id)
        if topology is not None and num_stages is None:
            num_stages = topology.get_dim("pipe")
        if num_stages not in (None, self._ring.size):
            self._refuse(f"num_stages={num_stages}; expected {self._ring.size}, the ring's size")
        if recompute_interval:
            self._refuse(
                f"recompute_interval={recompute_interval}; expected 0; let the layers call "
                f"torch.utils.checkpoint"
            )
        self._count = 1 if num_virtual_pipeline_stages is None else num_virtual_pipeline_stages
        if self._count < 1:
            self._refuse(f"num_virtual_pipeline_stages={self._count}; expected 1 or more")
        self.loss_fn = loss_fn
        self._descs, self._parts = [*layers], self._ring.size * self._count
        self._ends = self._segment(seg_method)
        self.shared_layers: dict[str, torch.nn.Module] = {}
        self.chunks = torch.nn.ModuleList(
            self._chunk(chunk * self._ring.size + self._ring.rank, use_cudagraph)
            for chunk in range(self._count)
        )
        self.to(self._ring.device)
        self._weights = self._share(shared_ring_id)

    def forward(self, x: Any, chunk_id: int | None = None) -> Any:
        """Run one stage of this rank.

        Args:
            x: The stage's input: the model's on the first stage, else the output of the stage
                before.
            chunk_id: Number of the stage among those of this rank. It may be None if there is only
                one.

        Returns:
            The stage's output.

        Raises:
            ArgumentError: ``chunk_id`` is missing, or this rank has no such stage.
        """
        if chunk_id is None and self._count > 1:
            self._refuse(f"chunk_id is missing; expected 0 to {self._count - 1}")
        if not 0 <= (chunk_id or 0) < self._count:
            self._refuse(f"chunk_id={chunk_id}; expected 0 to {self._count - 1}")
        return self.chunks[chunk_id or 0](x)

    def allreduce_shared_weight_gradients(self) -> None:
        """Add up the gradients of shared weights over the stages that have them."""
        for ring, weight in self._weights:
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = c_allreduce_sum(grad, ring_id=ring.ring_id, use_calc_stream=True)

    def get_stage_from_index(self, layer_idx: int) -> int:
        """Return the rank of the stage that has a layer.

        Args:
            layer_idx: The layer's position in ``layers``.

        Returns:
            The rank's position in the ring.

        Raises:
            ArgumentError: There is no such layer.
        """
        if not 0 <= layer_idx < len(self._descs):
            self._refuse(f"layer_idx={layer_idx}; expected 0 to {len(self._descs) - 1}")
        return self._part_of(layer_idx) % self._ring.size

    def _part_of(self, layer: int) -> int:
        return next(part for part, end in enumerate(self._ends[1:]) if layer < end)

    def _chunk(self, part: int, use_cudagraph: bool) -> torch.nn.Module:
        layers = [
            self._built(desc) for desc in self._descs[self._ends[part] : self._ends[part + 1]]
        ]
        if not use_cudagraph:
            return Layers(layers)
        objects = {id(x): x for x in self.shared_layers.values()}
        used = [x for x in objects.values() if any(_uses(layer, x) for layer in layers)]
        return pipeline(layers, shared=used)

    def _built(self, desc: Any) -> Callable[..., Any]:
        if not isinstance(desc, LayerDesc):
            return desc  # type: ignore[no-any-return]  # checked with the layers
        if not isinstance(desc, SharedLayerDesc):
            return desc.build_layer()  # type: ignore[no-any-return]
        if desc.layer_name not in self.shared_layers:
            self.shared_layers[desc.layer_name] = desc.build_layer()
        return _Shared(self.shared_layers[desc.layer_name], desc.forward_func)

    def _share(self, first_id: int) -> list[tuple[CommContext, torch.Tensor]]:
        """Return the shared weights with their rings, after the first stage has set the values."""
        pairs = []
        users: dict[str, set[int]] = {}
        attributes: dict[str, str] = {}
        for i, desc in enumerate(self._descs):
            if isinstance(desc, SharedLayerDesc):
                users.setdefault(desc.layer_name, set()).add(self.get_stage_from_index(i))
                attributes.setdefault(desc.layer_name, desc.shared_weight_attr)
        for number, (key, stages) in enumerate(users.items(), start=first_id):
            ring = new_ring(number, [self._ring.ranks[stage] for stage in sorted(stages)])
            if ring is not None:
                weight = getattr(self.shared_layers[key], attributes[key])
                with torch.no_grad():
                    values = c_broadcast(weight, root=0, ring_id=number, use_calc_stream=True)
                    weight.copy_(values)
                pairs.append((ring, weight))
        return pairs

    def _segment(self, method: str | Sequence[int]) -> list[int]:
        """Return the first layer of each stage, and the number of layers."""
        count, parts = len(self._descs), self._parts
        if not isinstance(method, str):
            ends = [*method]
            if len(ends) != parts + 1 or ends[0] != 0 or ends[-1] != count or ends != sorted(ends):
                self._refuse(
                    f"seg_method={ends}; expected {parts + 1} positions that rise from 0 to {count}"
                )
            return ends
        if count < parts:
            self._refuse(f"{count} layers for {parts} stages; expected one layer or more for each")
        if method == "uniform":
            return _uniform(count, parts)
        if not method.startswith("layer:"):
            self._refuse(f"seg_method={method!r}; expected uniform, layer:Name, or positions")
        name = re.compile(method.removeprefix("layer:"), re.IGNORECASE)
        places = [i for i, desc in enumerate(self._descs) if name.search(_name(desc))]
        if not places or len(places) % parts:
            self._refuse(
                f"seg_method={method!r}: {len(places)} layers have this name; expected a multiple "
                f"of {parts} stages"
            )
        each = len(places) // parts
        return [0, *(places[part * each - 1] + 1 for part in range(1, parts)), count]

    def _refuse(self, text: str) -> NoReturn:
        raise ArgumentError(f"{self._ring._describe('PipelineLayer')}: {text}")


class _Shared(torch.nn.Module):
    """One use of a shared layer."""

    def __init__(self, layer: torch.nn.Module, forward: Callable[..., Any] | None) -> None:
        super().__init__()
        self.layer, self._forward = layer, forward

    def forward(self, x: Any) -> Any:
        """Call the layer, or what its description says."""
        return self.layer(x) if self._forward is None else self._forward(self.layer, x)


def _uses(layer: Any, shared: torch.nn.Module) -> bool:
    return isinstance(layer, _Shared) and layer.layer is shared


def _name(desc: Any) -> str:
    """Return the name of the class that a description builds, or of a layer's own."""
    if isinstance(desc, LayerDesc):
        return getattr(desc.layer_func, "__name__", "")
    return type(desc).__name__


def _uniform(count: int, parts: int) -> list[int]:
    """Return the ends of parts of the same size; the last ones have one layer more."""
    size, extra = divmod(count, parts)
    ends = [0]
    for part in range(1, parts + 1):
        ends.append(ends[-1] + size + (part > parts - extra))
    return ends
