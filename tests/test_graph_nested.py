"""CapturedFunction modules of torch.cuda, and graphs of the program, inside a capture."""

import copy
from typing import Any

import torch

from commlib import graph
from commlib.errors import GraphError
from tests.support.checks import assert_equal, raises
from tests.support.device_meshes import mesh_of
from tests.support.runs_on import runs_on


@runs_on("gpu_ranks")
def test_graphed_modules(comm: Any) -> None:
    """One runs in a captured function, forward and backward, with the bits of eager code."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)]
    eager = torch.nn.Sequential(*layers).to(comm.device)
    graphed = copy.deepcopy(eager)
    torch.cuda.make_graphed_callables(graphed, (torch.zeros(3, 8, device=comm.device),))
    scored = graph.capture(lambda x: graphed(x) * 2, outputs="copy")
    for turn in range(5):
        x = torch.full((3, 8), float(turn), device=comm.device)
        actual, want = scored(x), eager(x) * 2
        assert_equal(torch.equal(actual, want), True, f"turn {turn}")
        for module, out in ((graphed, actual), (eager, want)):
            module.zero_grad()
            out.sum().backward()
        pairs = zip(graphed.parameters(), eager.parameters(), strict=True)
        assert_equal(
            [torch.equal(a.grad, b.grad) for a, b in pairs], [True] * 4, f"gradients, turn {turn}"
        )
    assert_equal(graph.report(scored)[0]["replays"] > 0, True, "replays")
    with torch.no_grad():
        assert_equal(torch.equal(graphed(x), eager(x)), True, "the graphed module itself")


@runs_on("gpu_ranks")
def test_graphs_of_the_program(comm: Any) -> None:
    """A replay of the program's own graph is refused by name, and the call counts."""
    total = torch.zeros(4, device=comm.device)
    cuda_graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(cuda_graph, stream=stream):
        total.add_(1)

    def f(x: torch.Tensor) -> torch.Tensor:
        cuda_graph.replay()
        return x + total

    x = torch.zeros(4, device=comm.device)
    with raises(GraphError, "replay of a CUDA graph can't be captured"):
        graph.capture(f)(x)
    captured = graph.capture(f, on_fail="eager")
    for turn in range(1, 4):
        total.zero_()
        assert_equal(captured(x).tolist(), [1.0] * 4, f"turn {turn}")


@runs_on("gpu_ranks")
def test_memory_that_each_call_empties(comm: Any) -> None:
    """Memory that each call fills and empties, as FSDP does, is the graph's own while it runs."""
    count, buffer = 1 << 12, torch.zeros(1 << 12, device=comm.device)
    memory = buffer.untyped_storage()
    memory.resize_(0)

    def f(x: torch.Tensor) -> torch.Tensor:
        memory.resize_(4 * count)
        buffer.copy_(x)
        y = buffer * 2
        memory.resize_(0)
        return y

    g, others = graph.capture(f, outputs="copy"), []
    for turn in range(6):
        others.append(torch.full((count,), -1.0, device=comm.device))  # it may be there now
        result = g(torch.full((count,), float(turn), device=comm.device))
        assert_equal(torch.unique(result).tolist(), [2.0 * turn], f"turn {turn}")
        assert_equal(
            {x.sum().item() for x in others}, {-1.0 * count}, f"other memory in turn {turn}"
        )
        assert_equal(memory.nbytes(), 0, "bytes after the call")
    assert_equal(graph.report(g)[0]["replays"], 5, "replays")


@runs_on("gpu_ranks")
def test_steps_with_fsdp(comm: Any) -> None:
    """A training step with FSDP2 has the bits of eager code when all of it is captured."""
    from torch.distributed.fsdp import fully_shard

    def trained(captured: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)]
        model = torch.nn.Sequential(*layers).to(comm.device)
        mesh = mesh_of(comm)
        for part in (layers[0], layers[2], model):
            fully_shard(part, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            result: torch.Tensor = loss.detach()
            return result

        call, losses = step, []
        for turn in range(8):
            if turn == 2:  # what FSDP makes in its first steps is there
                call = captured(step)
            x = torch.full((4, 8), turn + 1.0 + comm.rank, device=comm.device)
            losses.append(call(x).clone())
        return [*losses, *(p.to_local().clone() for p in model.parameters())]  # type: ignore[attr-defined]

    graphs = []

    def captured(step: Any) -> Any:
        graphs.append(graph.capture(step, outputs="copy"))
        return graphs[-1]

    want = trained(lambda step: step)
    equal = [torch.equal(a, b) for a, b in zip(trained(captured), want, strict=True)]
    assert_equal(equal, [True] * len(want), "bits")
    assert_equal(graph.report(graphs[0])[0]["replays"] > 1, True, "replays")
