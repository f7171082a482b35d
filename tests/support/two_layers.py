"""Two linear layers, eager and captured, with the same weights and the same batches."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from commlib import graph
from commlib.graph.options import Gradients
from tests.support.checks import assert_bits_equal

WIDTH = 6


def model_on(device: torch.device) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device)


def rows(turn: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(turn)
    return torch.randn(4, WIDTH, generator=generator).to(device)


def pair(
    device: torch.device, gradients: Gradients, **options: Any
) -> tuple[nn.Module, nn.Module, Any]:
    """Return two equal models, and the captured form of the second."""
    eager = model_on(device)
    replica = copy.deepcopy(eager)
    return eager, replica, graph.capture(replica, gradients=gradients, **options)


def same_grads(eager: nn.Module, own: nn.Module, what: str) -> None:
    for (name, one), other in zip(eager.named_parameters(), own.parameters(), strict=True):
        assert_bits_equal(other.grad, one.grad, f"{what}, {name}")
