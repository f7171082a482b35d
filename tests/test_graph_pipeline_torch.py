"""Captured stages under the schedules of torch.distributed.pipelining."""

from collections import Counter

import pytest

from tests.support.processes import start

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.two_gpus])


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_schedules_of_torch(device: str) -> None:
    """1F1B and interleaved 1F1B: eager bits, and no capture once all counts have been seen."""
    process = start(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("tests/programs/torch_pipeline.py", device),
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    expected = {
        f"{chunks} chunks, {how}: same True, settled True": 2  # ranks
        for chunks in (1, 2)
        for how in ("pipeline", "capture")
    }
    assert Counter(out.splitlines()) == expected
