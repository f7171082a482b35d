"""Let torch's compile caches hold graphs with registered ops, keyed by the operators' sources."""

import functools
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Carries the effect token that orders ops. The caches reject it unless it is marked with a version.
_CARRIER = "torch.ops.higher_order.with_effects"


def cacheable(fake: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fake`` with a side effect: tracing it makes the graph cacheable.

    torch.compile runs fakes before it looks up a graph. Marking then, and not on import, keeps
    the compiler out of programs that do not compile.
    """

    @functools.wraps(fake)
    def traced(*args: Any, **kwargs: Any) -> Any:
        _mark()
        return fake(*args, **kwargs)

    return traced


def _mark() -> None:
    """Mark the token's carrier in Inductor's config, which is part of every cache key."""
    config = sys.modules.get("torch._inductor.config")
    marked = getattr(config, "unsafe_marked_cacheable_functions", None)
    if isinstance(marked, dict) and marked.get(_CARRIER) != _version():
        config.unsafe_marked_cacheable_functions = {**marked, _CARRIER: _version()}  # type: ignore[union-attr]


@functools.cache
def _version() -> str:
    """Return a digest of all operators: fakes and gradient formulas are part of compiled code."""
    sources = sorted(Path(__file__).parent.parent.rglob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources))
    return f"commlib.ops {digest.hexdigest()}"
