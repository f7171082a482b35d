"""The flags of commlib: one row per flag."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from commlib.flags import values

UNIFIED: Final = "FLAGS_dynamic_static_unified_comm"
TIMEOUT: Final = "FLAGS_comm_timeout_s"
CLOSE_TIMEOUT: Final = "FLAGS_comm_close_timeout_s"
CHANNEL: Final = "FLAGS_comm_channel_mib"
CUSTOM_ALLREDUCE: Final = "FLAGS_custom_allreduce"
ASYNC_BLOCKS: Final = "FLAGS_comm_async_blocks"
CHECK: Final = "FLAGS_comm_check"
RUN_TOKEN: Final = "FLAGS_comm_run_token"
TORCH_BACKEND: Final = "FLAGS_comm_torch_backend"
GRAPH_VERIFY: Final = "FLAGS_graph_verify"
GRAPH_DRIFT: Final = "FLAGS_graph_drift"
PADDLE_VERSION: Final = "FLAGS_comm_paddle_version"
MALLOC_ASYNC: Final = "FLAGS_use_cuda_malloc_async_allocator"

Value: TypeAlias = bool | int | float | str
Switch: TypeAlias = Literal[  # flags that are a bool
    "FLAGS_dynamic_static_unified_comm",
    "FLAGS_custom_allreduce",
    "FLAGS_comm_torch_backend",
    "FLAGS_use_cuda_malloc_async_allocator",
]
Seconds: TypeAlias = Literal["FLAGS_comm_timeout_s", "FLAGS_comm_close_timeout_s"]
Number: TypeAlias = Literal[
    "FLAGS_comm_channel_mib",
    "FLAGS_comm_async_blocks",
    "FLAGS_comm_check",
    "FLAGS_graph_drift",
    "FLAGS_comm_paddle_version",
]
Text: TypeAlias = Literal["FLAGS_comm_run_token"]
Schedule: TypeAlias = Literal["FLAGS_graph_verify"]


@dataclass(frozen=True)
class Flag:
    """One flag: its name, the type and parser of its value, its default and its description."""

    name: str
    kind: str
    parse: Callable[[str, object], Value]
    default: Value
    description: str
    freezes: bool = False


FLAGS = {
    flag.name: flag
    for flag in (
        Flag(
            UNIFIED,
            "bool",
            values.boolean,
            False,
            "one CommContextManager owns the communicators (1) or torch.distributed groups do (0)",
            freezes=True,
        ),
        Flag(
            TIMEOUT,
            "seconds",
            values.seconds,
            600.0,
            "deadline of creating a ring and of a CPU wait",
        ),
        Flag(
            CLOSE_TIMEOUT,
            "seconds",
            values.seconds,
            10.0,
            "deadline of closing one communicator",
        ),
        Flag(
            CHANNEL,
            "MiB",
            values.mebibytes,
            128,
            "GPU memory through which the ranks of one host exchange rows; 0: NCCL moves them",
        ),
        Flag(
            CUSTOM_ALLREDUCE,
            "bool",
            values.boolean,
            True,
            "push kernels run the collectives that they run faster (1), or none (0)",
        ),
        Flag(
            ASYNC_BLOCKS,
            "blocks",
            values.blocks,
            32,
            "most blocks of a push kernel that runs at the same time as compute (sync_op=False)",
        ),
        Flag(
            CHECK,
            "level",
            values.level,
            1,
            "compare the ranks' calls: before every launch (2), at deadlines, close and every "
            "1000 calls (1), never (0)",
        ),
        Flag(
            RUN_TOKEN,
            "text",
            values.token,
            "",
            "name of the run, the same on all its ranks: ranks of two runs reject each other",
        ),
        Flag(
            TORCH_BACKEND,
            "bool",
            values.boolean,
            False,
            "torch.distributed makes rings for nccl, gloo and the default backend (1); read by "
            "`import torch`",
        ),
        Flag(
            PADDLE_VERSION,
            "release",
            values.release,
            0,
            "release of Paddle whose order of arguments alltoall and alltoall_single have: 2 or 3, "
            "0 for 2 with a warning",
        ),
        Flag(
            GRAPH_VERIFY,
            "schedule",
            values.schedule,
            "auto",
            "replays that are compared with the function: the first two and then fewer and fewer "
            "(auto), every N-th (N), none (0)",
        ),
        Flag(
            GRAPH_DRIFT,
            "replays",
            values.replays,
            0,
            "last replays of a function with collectives whose times report(drift=...) compares",
        ),
        Flag(
            MALLOC_ASYNC,
            "bool",
            values.boolean,
            False,
            "torch takes GPU memory from cudaMallocAsync (1), or as PYTORCH_CUDA_ALLOC_CONF says",
        ),
    )
}
PREFIXES = (  # a variable with one of these is reported even if no flag has a similar name
    *("FLAGS_comm_", "FLAGS_dynamic_static_unified", "FLAGS_custom_allreduce"),
    *("FLAGS_graph_", "FLAGS_use_cuda_malloc_async"),
)
