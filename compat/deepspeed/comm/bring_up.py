"""The names of ``deepspeed.comm`` about launchers, backends and logging; most of them have no task.

Rings find their launcher by themselves, and one backend carries everything.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from commlib.compat.deepspeed.comm.counters import counters
from commlib.rendezvous import environment

Function = TypeVar("Function", bound=Callable[..., Any])

ProcessGroup = dist.ProcessGroup
comms_logger = counters
cdb = dist  # the object that has the calls, in DeepSpeed its backend

_AML, _SAGEMAKER, _DLTS = "AZUREML_EXPERIMENT_ID", "SM_TRAINING_ENV", "DLTS_JOB_ID"


def set_backend(backend: object = None) -> None:
    """Do nothing: rings carry every call.

    Args:
        backend: Ignored.
    """


def init_deepspeed_backend(
    ds_backend: object = None, timeout: object = None, init_method: object = None
) -> None:
    """Do nothing: ``init_distributed`` makes what calls need.

    Args:
        ds_backend: Ignored.
        timeout: Ignored.
        init_method: Ignored.
    """


def mpi_discovery(distributed_port: int = 29500, verbose: bool = True) -> None:
    """Check that a launcher has started this process; rings read its variables by themselves.

    Args:
        distributed_port: Ignored: the launcher names the port.
        verbose: Ignored.

    Raises:
        BootstrapError: The variables of a launcher are not complete.
    """
    environment.world()


def in_aml() -> bool:
    """Return True in a job of Azure ML."""
    return environment.has(_AML)


def in_aws_sm() -> bool:
    """Return True in a job of SageMaker."""
    return environment.has(_SAGEMAKER)


def in_dlts() -> bool:
    """Return True in a job of DLTS."""
    return environment.has(_DLTS)


def timed_op(func: Function) -> Function:
    """Return the function as it is, under its own name: calls are counted, not timed.

    Args:
        func: The function.
    """
    return func


def has_allgather_base() -> bool:
    """Return True: ``all_gather_into_tensor`` is there."""
    return True


def has_reduce_scatter_base() -> bool:
    """Return True: ``reduce_scatter_tensor`` is there."""
    return True
