"""Ordered registered ops: kept in program order even if unused, and saved by checkpoints."""

from itertools import islice
from typing import Any

import torch
from torch._higher_order_ops import effects
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import checkpoint


def order(overload: Any, library: torch.library.Library) -> None:
    """Keep ``overload`` in program order among all ordered ops, even if its result is unused."""
    effects._register_effectful_op(overload, effects._EffectType.ORDERED)
    for mode in (FunctionalTensorMode, checkpoint._CachingTorchDispatchMode):
        torch.library.register_torch_dispatch(overload._name, mode, _saved, lib=library)


def _saved(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Let ``mode`` handle the op, and save its result for backward in a traced checkpoint.

    A recomputation in backward would lose its position in the order, and torch's partitioners
    fail on it. Eager checkpoints do not change.
    """
    proxies = get_proxy_mode()
    if proxies is None:
        return mode.__torch_dispatch__(func, types, args, kwargs)
    graph = proxies.tracer.graph
    before = len(graph.nodes)
    out = mode.__torch_dispatch__(func, types, args, kwargs)
    for node in islice(reversed(graph.nodes), len(graph.nodes) - before):
        if "recompute" in node.meta:
            node.meta["recompute"] = checkpoint.CheckpointPolicy.MUST_SAVE
    return out
