"""Captured stages under the schedules of torch.distributed.pipelining."""

from collections import Counter

import pytest

from tests.programs.torch_pipeline import SCHEDULES
from tests.support.launchers import on_gpus
from tests.support.processes import start

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCHES = [
    pytest.param("cpu", TORCHRUN, id="cpu"),
    pytest.param("cuda", on_gpus(), id="cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "launcher"), LAUNCHES)
def test_schedules_of_torch(device: str, launcher: tuple[str, ...]) -> None:
    """Eager bits with one and more stages per rank, and no capture after all counts were seen."""
    process = start(*launcher, "tests/programs/torch_pipeline.py", device)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    expected = {
        f"{kind.__name__}, {mode}: same True, settled True": 2  # ranks
        for kind, _ in SCHEDULES
        for mode in ("pipeline", "capture")
    }
    assert Counter(out.splitlines()) == expected
