"""Load what torchrun needs once, in a process from which launchers are forked."""

import sys

# What torchrun imports, but not torchrun itself: Python warns where ``-m`` runs a loaded module.
import torch.distributed.launcher.api  # noqa: F401
from torch.distributed.elastic.rendezvous import dynamic_rendezvous


def load_launcher() -> None:
    """Make torchrun start fast.

    It names its events by ``inspect.stack``, which visits all modules: 1 s per launch.
    """
    if hasattr(dynamic_rendezvous, "get_method_name"):  # private
        dynamic_rendezvous.get_method_name = _caller


def _caller(depth: int = 2) -> str:
    return sys._getframe(depth).f_code.co_name
