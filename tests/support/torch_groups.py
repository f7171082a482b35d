"""Programs of torch.distributed on live ranks: with torch's own backend, and with ours."""

import gc
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import commlib.compat.c10d  # noqa: F401  # registers the backend
from tests.support.checks import assert_bits_equal, assert_equal

STOCK = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
OURS = {"cpu": "commlib", "cuda": "cpu:gloo,cuda:commlib"}
_numbers = itertools.count()


def store_of() -> dist.Store:
    """Return a new part of the store of the live ranks; every rank calls it equally often."""
    port = int(os.environ["MASTER_PORT"])
    server = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    return dist.PrefixStore(f"torch {next(_numbers)}", server)


def end_earlier_group() -> None:
    """End the default group that an earlier test left; captured calls on it go first."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def initialised(ring: Any, backend: str, **options: Any) -> Iterator[Any]:
    """Initialise ``torch.distributed`` over the ranks of a ring; yields the group of all.

    Every rank waits until all have the group. If one rank had it, and ended it at once, that
    would close gloo's connections while ``init_process_group`` of another rank makes them.
    """
    end_earlier_group()
    store = store_of()
    options.setdefault("timeout", timedelta(seconds=30))
    dist.init_process_group(backend, store=store, rank=ring.rank, world_size=ring.size, **options)
    store.set(f"initialised {ring.rank}", "")
    store.wait([f"initialised {rank}" for rank in range(ring.size)])
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def assert_same_as_stock(ring: Any, program: Callable[[torch.device], Any]) -> None:
    """Run a program with torch's own backend and with ours; the results have the same bits."""
    results = []
    for backends in (STOCK, OURS):
        with initialised(ring, backends[ring.device.type]):
            torch.manual_seed(0)
            results.append(list(leaves(program(ring.device))))
    stock, ours = results
    assert_equal(len(ours), len(stock), "results")
    for number, (actual, expected) in enumerate(zip(ours, stock, strict=True)):
        label = f"result {number} of {program.__name__}"
        if isinstance(expected, torch.Tensor):
            assert_bits_equal(actual, expected, label)
        else:
            assert_equal(actual, expected, label)


def leaves(result: Any) -> Iterator[Any]:
    """Yield the tensors and plain values of a nested result, tensors as they are now."""
    if isinstance(result, torch.Tensor):
        yield result.detach().clone()
    elif isinstance(result, (list, tuple)):
        for one in result:
            yield from leaves(one)
    else:
        yield result


def whole(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors with the parts of all ranks in those that are split."""
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in tensors]
