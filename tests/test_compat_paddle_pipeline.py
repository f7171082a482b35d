"""compat.paddle.PipelineLayer: stages, shared weights, and graphs around them."""

import inspect
from typing import Any

import torch
from torch.nn import Linear

import commlib
from commlib.compat.paddle import LayerDesc, PipelineLayer, SharedLayerDesc
from commlib.errors import ArgumentError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on

WIDTH = 4


class Block(Linear):
    """A layer that has its number in all its weights."""

    def __init__(self, number: float) -> None:
        super().__init__(WIDTH, WIDTH)
        torch.nn.init.constant_(self.weight, number)
        torch.nn.init.zeros_(self.bias)


def product(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.t()


def numbers(stage: torch.nn.Module) -> list[int]:
    """Return the numbers of the blocks in a stage."""
    return [int(x.weight[0, 0]) for x in stage.modules() if isinstance(x, Block)]


def close(first: int) -> None:
    """Close the rings that a test has made."""
    for ring_id in commlib.CommContextManager.instance().rings():
        if ring_id >= first:
            commlib.close_ring(ring_id)


@runs_on("ranks")
def test_stages(comm: Any) -> None:
    """Layers are spread as upstream does; a bare function keeps its place among them."""
    blocks = [LayerDesc(Block, i) for i in range(1, 6)]
    x = torch.ones(2, WIDTH, device=comm.device)
    uniform = PipelineLayer(blocks, 2)
    assert_equal(numbers(uniform), [[1, 2], [3, 4, 5]][comm.rank], "the last stage has one more")
    assert_equal([uniform.get_stage_from_index(i) for i in range(5)], [0, 0, 1, 1, 1], "stages")
    mixed = [torch.tanh, *blocks[:2], torch.relu, *blocks[2:4]]
    by_name = PipelineLayer(mixed, seg_method="layer:block", num_virtual_pipeline_stages=2)
    parts = [numbers(chunk) for chunk in by_name.chunks]
    assert_equal(parts, [[comm.rank + 1], [comm.rank + 3]], "one block per stage")
    for capture in (False, True):
        layer = PipelineLayer(mixed, seg_method=[0, 2, 6], use_cudagraph=capture)
        want = torch.tanh(x).sum(1, keepdim=True)
        if comm.rank == 1:
            want = (x.sum(1, keepdim=True) * 2).repeat(1, WIDTH).relu()
            want = (want.sum(1, keepdim=True) * 3).repeat(1, WIDTH).sum(1, keepdim=True) * 4
        for turn in range(3):
            assert_bits_equal(layer(x), want.expand(2, WIDTH), f"capture {capture}, turn {turn}")


@runs_on("ranks")
def test_shared_weights(comm: Any) -> None:
    """The first stage's values hold on all stages, and gradients add up over them."""
    first = SharedLayerDesc("tied", Block, None, "weight", comm.rank + 2)
    last = SharedLayerDesc("tied", Block, product, "weight", comm.rank + 2)
    layer = PipelineLayer([first, LayerDesc(Block, 1), last], 2, use_cudagraph=True)
    weight: Any = layer.shared_layers["tied"].weight
    assert_bits_equal(weight.detach(), torch.full((WIDTH, WIDTH), 2.0), "rank 0 has drawn it")
    stage: Any = layer.chunks[0]
    names = [["layers 0 (eager)"], ["layers 0", "layers 1 (eager)"]][comm.rank]
    assert_equal([str(x) for x in stage.stretches], names, "the shared layer is outside")
    x = torch.ones(3, WIDTH, device=comm.device)
    for turn in range(1, 4):
        layer.zero_grad()
        y = layer(x)
        y.sum().backward()
        layer.allreduce_shared_weight_gradients()
        # 3 rows of ones on rank 0; on rank 1 the block makes each entry 4.
        want = torch.full((WIDTH, WIDTH), 3.0 + 12.0)
        assert_bits_equal(weight.grad, want, f"turn {turn}")
    close(1 << 20)


class Topology:
    """What a hybrid topology answers."""

    def get_dim(self, name: str) -> int:
        return {"pipe": 5}[name]


@runs_on("unified_ranks")
def test_bad_arguments(comm: Any) -> None:
    blocks = [LayerDesc(Block, i) for i in range(3)]
    cases: dict[str, dict[str, Any]] = {
        "num_stages=3; expected 2, the ring's size": {"num_stages": 3},
        "num_stages=5; expected 2, the ring's size": {"topology": Topology()},
        "recompute_interval=2; expected 0": {"recompute_interval": 2},
        "num_virtual_pipeline_stages=0; expected 1": {"num_virtual_pipeline_stages": 0},
        "3 layers for 4 stages": {"num_virtual_pipeline_stages": 2},
        "seg_method='even'; expected uniform": {"seg_method": "even"},
        "0 layers have this name": {"seg_method": "layer:Linear"},
        "3 layers have this name; expected a multiple of 2": {"seg_method": "layer:Block"},
        "expected 3 positions that rise from 0 to 3": {"seg_method": [0, 3]},
    }
    for text, options in cases.items():
        with raises(ArgumentError, "PipelineLayer", text, f"rank {comm.rank}"):
            PipelineLayer(blocks, **options)
    with raises(ArgumentError, "layer_func=3; expected a class"):
        LayerDesc(3)
    layer = PipelineLayer(blocks * 2, num_virtual_pipeline_stages=2)
    x = torch.ones(1, WIDTH, device=comm.device)
    with raises(ArgumentError, "chunk_id is missing; expected 0 to 1"):
        layer(x)
    with raises(ArgumentError, "chunk_id=2; expected 0 to 1"):
        layer(x, 2)
    with raises(ArgumentError, "layer_idx=6; expected 0 to 5"):
        layer.get_stage_from_index(6)


def test_signatures() -> None:
    """As upstream; what commlib adds follows by keyword."""
    parameters = inspect.signature(PipelineLayer.__init__).parameters
    assert [*parameters][1:] == [
        *("layers", "num_stages", "topology", "loss_fn", "seg_method", "recompute_interval"),
        *("recompute_ctx", "num_virtual_pipeline_stages", "use_cudagraph"),
        *("ring_id", "shared_ring_id"),
    ]
    own_additions = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert own_additions == ["ring_id", "shared_ring_id"]
    shared = [*inspect.signature(SharedLayerDesc.__init__).parameters][1:]
    assert shared == [
        *("key", "layer_func", "forward_func", "shared_weight_attr"),
        *("inputs", "kwargs"),
    ]
