"""One rank of a benchmark; started by torch's elastic launcher with NAME SETTINGS FILE DEADLINE."""

import faulthandler
import importlib
import json
import os
import sys
from pathlib import Path

import torch


def main(name: str, settings: str, file: str, deadline: str) -> None:
    """Run ``measure`` of the benchmark ``name``; rank 0 writes its result to ``file`` as JSON."""
    faulthandler.dump_traceback_later(float(deadline), exit=True)
    torch.set_num_threads(1)
    benchmark = importlib.import_module(f"commlib.tools.bench.{name}")
    result = benchmark.measure(**json.loads(settings))
    if os.environ["RANK"] == "0":
        Path(file).write_text(json.dumps(result))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
