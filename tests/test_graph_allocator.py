"""Graphs under torch's allocators: cudaMallocAsync, and its own."""

import json

import pytest

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
    found = next(line for line in out.splitlines() if line.startswith("memory "))
    (memory,) = json.loads(found.removeprefix("memory "))
    assert memory["allocator"] == name
    assert memory["total_bytes"] >= memory["graph_bytes"] > 0
