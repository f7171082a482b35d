"""The layers of a decoder as the legacy fused_multi_transformer takes them."""

from typing import Any

import torch

from commlib.compat import paddle
from tests.support.decoder import CAPACITY, SEQUENCES, Case, cast

Legacy: Any = paddle.fused_multi_transformer
WIDTH = 8  # of a head


class Layers:
    """Layers of this rank, their weights as the operator takes them, and activations."""

    def __init__(self, ring: Any) -> None:
        case = Case(ring, "legacy")
        layers: list[Any] = [cast(layer, case.dtype, ring.device) for layer in case.layers]
        self.heads, hidden = case.config.heads // ring.size, case.config.hidden
        self.ring, self.x = ring, case.x.to(ring.device)
        self.weights: list[Any] = [
            [layer.attention_norm for layer in layers],
            [layer.attention_norm_bias for layer in layers],
            [layer.qkv.view(3, self.heads, WIDTH, hidden) for layer in layers],
            [layer.qkv_bias.view(3, self.heads, WIDTH) for layer in layers],
            [layer.out.t() for layer in layers],
            [layer.out_bias for layer in layers],
            [layer.ffn_norm for layer in layers],
            [layer.ffn_norm_bias for layer in layers],
            [layer.up.t() for layer in layers],
            [layer.up_bias for layer in layers],
            [layer.down.t() for layer in layers],
            [layer.down_bias for layer in layers],
        ]

    def caches(self, count: int = SEQUENCES) -> list[torch.Tensor]:
        shape = (2, count, self.heads, CAPACITY, WIDTH)
        return [torch.zeros(shape, device=self.ring.device) for _ in self.weights[0]]

    def __call__(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        result = Legacy(x, *self.weights, ring_id=0, **how)
        y: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return y
