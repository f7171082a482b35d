"""The allocator of torch for GPU memory: its own, or the driver's cudaMallocAsync.

Torch reads the choice from the environment when it is imported, and keeps it.
"""

import re
import sys
from collections.abc import MutableMapping

from commlib.errors import FlagError

MALLOC_ASYNC = "cudaMallocAsync"
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads the first that is set


def current() -> str | None:
    """Return the name of torch's allocator, "native" or "cudaMallocAsync"; None without CUDA."""
    import torch  # not at the top: the choice is made before

    return torch.cuda.get_allocator_backend() if torch.backends.cuda.is_built() else None


def is_native() -> bool:
    """Return True if GPU memory comes from torch's own allocator, which has pools."""
    return current() == "native"


def select_malloc_async(flag: str, environment: MutableMapping[str, str]) -> None:
    """Have torch use cudaMallocAsync; a torch without CUDA has no such choice.

    Args:
        flag: The name of the flag that asks for it.
        environment: Where torch reads its settings.

    Raises:
        FlagError: Torch was imported with another allocator, or its settings name another one.
    """
    variable = next((name for name in _VARIABLES if name in environment), _VARIABLES[0])
    settings = environment.get(variable, "")
    named = re.search(r"\bbackend:\s*(\w+)", settings)
    if named is not None and named[1] != MALLOC_ASYNC:
        raise FlagError(
            f"{flag}=1 contradicts {variable}={settings!r}, which selects {named[1]!r}; expected "
            f"{MALLOC_ASYNC!r} or no backend; remove one of the two"
        )
    if "torch" in sys.modules:
        alloc = current()
        if alloc not in (None, MALLOC_ASYNC):
            raise FlagError(
                f"{flag}=1 is too late: torch was imported with the allocator {alloc!r}, and can't "
                f"change it; expected {MALLOC_ASYNC!r}; run `export {flag}=1` and import commlib "
                f"before torch, or run `export {variable}=backend:{MALLOC_ASYNC}`"
            )
    elif named is None:
        others = f",{settings}" if settings else ""
        environment[variable] = f"backend:{MALLOC_ASYNC}{others}"
