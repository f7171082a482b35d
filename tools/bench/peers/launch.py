"""A launch of a benchmark's ranks with the peers of a folder."""

from typing import Any

from commlib.tools.bench.launch import launch
from commlib.tools.bench.peers.folder import libraries
from commlib.tools.bench.peers.watch import launch_without


def launch_with_peers(name: str, nproc: int, folder: str | None, **settings: Any) -> Any:
    """Launch the ranks of the benchmark ``name``; again without each peer that ends them.

    Its ``measure`` takes ``libraries``, ``journal`` and ``lost`` in addition to ``settings``, and
    returns a dictionary.

    Returns:
        What it returned on rank 0, with all reasons of peers left out in "failed".

    Raises:
        LaunchError: The ranks ended while no peer was running.
    """
    files = {} if folder is None else libraries(folder, name)
    paths = {file: str(path) for file, path in files.items()}

    def start(journal: str, lost: list[str]) -> Any:
        peers: dict[str, Any] = {"libraries": paths, "journal": journal, "lost": lost}
        return launch(name, nproc, **peers, **settings)

    stats, lost = launch_without(start)
    return stats | {"failed": stats["failed"] | {peer: {"run": why} for peer, why in lost.items()}}
