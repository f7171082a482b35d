"""Load torch.compile once, in a process from which others are forked."""

import inspect
import sys
from typing import Any

import torch
import torch._dynamo.guards
import torch._inductor.compile_fx
import torch.hub


def load_compiler() -> None:
    """Compile a function: the first one of a process takes 0.5 s longer than any other.

    Where there are GPUs nothing is compiled: it would start CUDA, which no fork can use.
    """
    inspect.getmodule(sys._getframe())  # reads the paths of all modules; torch asks for some
    # torch times the guards of each compiled function, after it has flushed the processor's
    # caches for 18 ms.
    torch._dynamo.guards.profile_guard_manager = lambda *arguments: 0.0
    if torch.cuda.device_count():
        return
    progress: Any = torch.hub.tqdm  # where it is installed, it starts a thread
    interval = getattr(progress, "monitor_interval", 0)
    progress.monitor_interval = 0
    torch.compile(lambda x: x.sin() + 1)(torch.ones(64, requires_grad=True))
    progress.monitor_interval = interval
    torch._dynamo.reset()
