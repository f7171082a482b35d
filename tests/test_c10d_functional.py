"""Every functional collective on the backend "commlib": the bits of torch's own backends."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the operators

from tests.support.runs_on import runs_on
from tests.support.torch_groups import assert_same_as_stock

Tensor = torch.Tensor
ops = torch.ops._c10d_functional
backward = torch.ops._c10d_functional_autograd


def batch(x: Tensor, group: str) -> Any:
    peer = 1 - dist.get_rank()
    return ops.batch_p2p_ops(
        ["isend", "irecv"], [peer, peer], [0, 0], [x, torch.zeros_like(x)], group
    )


def recv(x: Tensor, group: str) -> Any:
    if dist.get_rank() == 0:
        return ops.isend(x, 1, 0, group)
    return ops.irecv(x.clone(), 0, 0, group)


OPERATORS: dict[str, Callable[[Tensor, str], Any]] = {
    "all_reduce": lambda x, g: ops.all_reduce(x, "sum", g),
    "all_reduce_coalesced": lambda x, g: ops.all_reduce_coalesced([x, x + 1], "max", g),
    "all_gather_into_tensor": lambda x, g: ops.all_gather_into_tensor(x, 2, g),
    "all_gather_into_tensor_out": lambda x, g: ops.all_gather_into_tensor_out(
        x, 2, g, out=x.new_empty(16)
    ),
    "all_gather_into_tensor_coalesced": lambda x, g: ops.all_gather_into_tensor_coalesced(
        [x, x + 1], 2, g
    ),
    "reduce_scatter_tensor": lambda x, g: ops.reduce_scatter_tensor(x, "sum", 2, g),
    "reduce_scatter_tensor_out": lambda x, g: ops.reduce_scatter_tensor_out(
        x, "sum", 2, g, out=x.new_empty(4)
    ),
    "reduce_scatter_tensor_coalesced": lambda x, g: ops.reduce_scatter_tensor_coalesced(
        [x, x + 1], "sum", 2, g
    ),
    "all_to_all_single": lambda x, g: ops.all_to_all_single(x, [4, 4], [4, 4], g),
    "broadcast": lambda x, g: ops.broadcast(x, 1, g),
    "batch_p2p_ops": batch,
    "irecv": recv,
    "_wrap_tensor_autograd": lambda x, g: ops._wrap_tensor_autograd(x) + 0,
    "all_gather_into_tensor_autograd": lambda x, g: backward.all_gather_into_tensor(x, 2, g),
    "reduce_scatter_tensor_autograd": lambda x, g: backward.reduce_scatter_tensor(x, "sum", 2, g),
    "all_to_all_single_autograd": lambda x, g: backward.all_to_all_single(x, [4, 4], [4, 4], g),
}
# Their output is their input, which torch does not compile.
EAGER: dict[str, Callable[[Tensor, str], Any]] = {
    "all_reduce_": lambda x, g: ops.all_reduce_(x.clone(), "sum", g),
    "all_reduce_coalesced_": lambda x, g: ops.all_reduce_coalesced_([x.clone(), x + 1], "min", g),
    "broadcast_": lambda x, g: ops.broadcast_(x.clone(), 0, g),
}
IN_OTHERS = {"wait_tensor", "isend"}


def here(name: str) -> bool:
    """Return True if this torch has the operator."""
    return name.endswith("_autograd") or hasattr(ops, name)


def waited(step: Callable[[Tensor, str], Any]) -> Callable[[Tensor, str], Any]:
    def call(x: Tensor, group: str) -> Any:
        done = step(x, group)
        if isinstance(done, (list, tuple)):
            return [ops.wait_tensor(y) + 0 for y in done]
        return ops.wait_tensor(done) + 0

    return call


def compiled(step: Callable[[Tensor, str], Any], x: Tensor, group: str) -> Any:
    """Return the result of compiled code, or that torch does not compile the operator."""
    torch._dynamo.reset()
    try:
        return torch.compile(waited(step), backend="aot_eager", fullgraph=True)(x, group)
    except RuntimeError as error:  # torch 2.11, before any launch
        if "whose output has alias annotations" not in str(error):
            raise
        return "not compiled"


def every_operator(device: torch.device) -> Any:
    world: Any = dist.group.WORLD
    group = world.group_name
    results = []
    for name, step in {**OPERATORS, **EAGER}.items():
        if not here(name):
            continue
        x = torch.arange(8.0, device=device) + 10 * dist.get_rank()
        results.append(waited(step)(x, group))
        if name in OPERATORS:
            results.append(compiled(step, x, group))
    return results


@runs_on("ranks", deadline=240)
def test_every_operator(ring: Any) -> None:
    """Also with torch's own backend after the import of ours: its groups keep torch's kernels."""
    assert_same_as_stock(ring, every_operator)


def test_no_operator_is_left_out() -> None:
    space = "_c10d_functional::"
    names = {
        name.removeprefix(space).partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(space)
    }
    assert names <= {*OPERATORS, *EAGER, *IN_OTHERS}
