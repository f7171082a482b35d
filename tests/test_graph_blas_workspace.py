"""The workspaces of cuBLAS in captured graphs."""

import pytest

from tests.support.processes import run


@pytest.mark.gpu
def test_replays_after_torch_has_freed_the_workspaces() -> None:
    """Products keep their bits, and write to nobody's memory."""
    code, out, err = run(
        "-m",
        "tests.programs.graph_blas_workspace",
        fresh=True,
        FLAGS_dynamic_static_unified_comm="1",
    )
    assert code == 0, f"{out}\n{err}"
    assert out.count("right after") == 2
