"""compat.deepspeed.comm: the names about launchers and backends, and errors of unknown names."""

import pytest
import torch
import torch.distributed as torch_dist

from commlib.compat.deepspeed import comm as dist
from commlib.compat.deepspeed.comm.counters import Counters

NAMES = (
    *("ProcessGroup", "set_backend", "init_deepspeed_backend", "mpi_discovery", "in_aml"),
    *("in_aws_sm", "in_dlts", "timed_op", "comms_logger", "cdb", "has_allgather_base"),
    "has_reduce_scatter_base",
)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_there(name: str) -> None:
    assert name in dist.__all__
    assert getattr(dist, name) is not None


def test_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dist.ProcessGroup is torch_dist.ProcessGroup
    assert dist.has_allgather_base() and dist.has_reduce_scatter_base()
    dist.set_backend()
    dist.init_deepspeed_backend(None, None, None)
    for name, asked in (
        ("AZUREML_EXPERIMENT_ID", dist.in_aml),
        ("SM_TRAINING_ENV", dist.in_aws_sm),
        ("DLTS_JOB_ID", dist.in_dlts),
    ):
        monkeypatch.delenv(name, raising=False)
        assert not asked()
        monkeypatch.setenv(name, "1")
        assert asked()

    @dist.timed_op
    def double(x: int) -> int:
        return 2 * x

    assert (double(4), double.__name__) == (8, "double")


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="did you mean 'all_reduce'"):
        _ = dist.all_reduc  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"call torch\.distributed\.TCPStore"):
        _ = dist.TCPStore  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"does not have it, nor has torch\.distributed"):
        _ = dist.zzz  # type: ignore[attr-defined]


def test_reasons() -> None:
    with pytest.raises(AttributeError, match=r"call torch\.distributed\.get_backend.*'commlib'"):
        _ = dist.get_backend  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"leave it away: push kernels"):
        _ = dist.enable_symm_mem_for_group  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"did you mean 'set_backend'"):
        _ = dist.set_backen  # type: ignore[attr-defined]


def test_switches_of_the_logger() -> None:
    logger = Counters(enabled=True, all=False)
    x = torch.ones(2)

    def counted() -> list[str]:
        logger.found.clear()
        for name in ("all_reduce", "broadcast"):
            logger.count(name, [x], asked=False)
        return [name for name, _ in logger.found]

    assert counted() == []
    logger.start_profiling_op(["broadcast"])
    assert counted() == ["broadcast"]
    logger.start_profiling_comms()
    assert counted() == ["all_reduce", "broadcast"]
    logger.stop_profiling_comms()
    logger.stop_profiling_op(["broadcast"])
    assert counted() == []
