"""One rank of a benchmark: NAME SETTINGS FILE DEADLINE GPU, started by torch's elastic launcher."""

import faulthandler
import gc
import importlib
import json
import os
import sys
from pathlib import Path

import torch

from commlib.tools.launch import one_gpu_for_all

SHARED, OWN = "shared", "own"


def main(name: str, settings: str, file: str, deadline: str, gpu: str) -> None:
    """Run ``measure`` of the benchmark ``name``; rank 0 writes its result to ``file`` as JSON.

    ``gpu``: SHARED if all ranks have the only one.
    """
    if gpu == SHARED:
        os.environ.update(one_gpu_for_all(int(os.environ["RANK"])))
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(deadline), exit=True)
    torch.set_num_threads(1)
    benchmark = importlib.import_module(f"commlib.tools.bench.{name}")
    result = benchmark.measure(**json.loads(settings))
    if os.environ["RANK"] == "0":
        Path(file).write_text(json.dumps(result))
    faulthandler.cancel_dump_traceback_later()
    gc.freeze()  # else the interpreter's last collection walks all of torch, 2 s per rank


if __name__ == "__main__":
    main(*sys.argv[1:])
