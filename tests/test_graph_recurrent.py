"""Recurrent networks of cuDNN: weights in one buffer, and dropout with its own random numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from commlib import graph
from commlib.graph.operators.generators import default_generator
from tests.support.checks import assert_equal
from tests.support.runs_on import runs_on

_SEEDED_AT = 6  # the turn before which the program sets the generator


def losses(kind: Any, comm: Any, captured: Callable[[Any], Any]) -> list[torch.Tensor]:
    """Train a network with dropout; returns what each turn gives, and where it leaves torch."""
    torch.manual_seed(0)
    network = kind(4, 8, num_layers=2, dropout=0.5).to(comm.device)
    call, results = captured(network), []
    for turn in range(10):
        if turn == _SEEDED_AT:
            torch.manual_seed(5)
        network.zero_grad()
        out, _ = call(torch.full((3, 2, 4), turn + 1.0, device=comm.device))
        out.square().mean().backward()
        results += [out.detach().clone(), *(p.grad.clone() for p in network.parameters())]
        results.append(default_generator(comm.device).get_state())
    return results


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@runs_on("unified_ranks")
def test_dropout_of_recurrent_networks(comm: Any, kind: Any) -> None:
    """Captured, a network drops out what it does eagerly, also after the generator was set."""
    graphs = []

    def captured(network: Any) -> Any:
        graphs.append(graph.capture(network))
        return graphs[-1]

    want = losses(kind, comm, lambda network: network)
    actual = losses(kind, comm, captured)
    equal = [torch.equal(a, b) for a, b in zip(actual, want, strict=True)]
    assert_equal(equal, [True] * len(want), "bits")
    assert_equal(graph.report(graphs[0])[0]["replays"] > 1, True, "replays")
