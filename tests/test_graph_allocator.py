"""Graphs under torch's allocators: cudaMallocAsync, and its own."""

import json

import pytest
import torch

from tests.support.processes import run


@pytest.mark.gpu
@pytest.mark.parametrize(("flag", "name"), [("1", "cudaMallocAsync"), ("0", "native")])
def test_graphs(flag: str, name: str) -> None:
    """Kinds, slots, whole steps, failed captures and releases; the report names the allocator."""
    code, out, err = run(
        "-m",
        "tests.programs.graph_allocator",
        fresh=True,
        FLAGS_use_cuda_malloc_async_allocator=flag,
        FLAGS_dynamic_static_unified_comm="1",
    )
    assert code == 0, f"{out}\n{err}"
    assert "right at the end" in out
    record = next(line for line in out.splitlines() if line.startswith("memory "))
    (memory,) = json.loads(record.removeprefix("memory "))
    assert memory["allocator"] == name
    assert memory["total_bytes"] >= memory["graph_bytes"] > 0


def test_comparison() -> None:
    """One table, a line per fresh process."""
    code, out, err = run(
        *("-m", "tests.programs.two_allocators"),
        fresh=True,
        FLAGS_dynamic_static_unified_comm="1",
    )
    assert code == 0, f"{out}\n{err}"
    titles, *lines = out.splitlines()
    assert titles.split()[:3] == ["allocator", "graphs", "nodes"]
    names = ["native", "cudaMallocAsync"] if torch.cuda.is_available() else ["cpu", "cpu"]
    assert [line.split()[0] for line in lines] == names
    assert all(float(cell) > 0 for line in lines for cell in line.split()[1:]), out
