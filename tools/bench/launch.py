"""A launch of one benchmark's ranks on this machine."""

import json
import tempfile
from pathlib import Path
from typing import Any

from commlib.tools.bench.rank import OWN, SHARED
from commlib.tools.launch import environment
from commlib.tools.launch import launch as launch_ranks

RANK_DEADLINE_S = 300.0  # then a rank prints its stack and exits


def launch(
    name: str, nproc: int, *, unified: bool = True, shared: bool = False, **settings: object
) -> Any:
    """Run ``measure(**settings)`` of the benchmark ``name`` on ``nproc`` ranks.

    ``shared``: all ranks share the only GPU.

    Returns what it returned on rank 0. Raises ``LaunchError`` with the ranks' last words when one
    fails or the deadline passes.
    """
    with tempfile.TemporaryDirectory(prefix="commlib-bench-") as folder:
        path = Path(folder)
        result = path / "result.json"
        program = ["-m", "commlib.tools.bench.rank", name, json.dumps(settings)]
        program += [str(result), str(RANK_DEADLINE_S), SHARED if shared else OWN]
        env = environment(unified)
        launch_ranks(name, program, nproc, env, path, RANK_DEADLINE_S)
        return json.loads(result.read_text())
