"""A user's program, which type checkers read and nothing runs.

A checker must report the lines marked as refused and no other line.
"""

import datetime
from typing import assert_type

import torch
from torch import Tensor

import commlib
from commlib import compat, errors, export, flags, graph, ops
from commlib.ops.inference import ContiguousCache, DecoderConfig, DecoderLayer


def start() -> commlib.CommContext:
    """Create the ring of all ranks and a ring of two."""
    ring = commlib.init("gloo", device="cpu", timeout=datetime.timedelta(seconds=30))
    assert_type(ring, commlib.CommContext)
    assert_type((ring.ring_id, ring.rank, ring.size), tuple[int, int, int])
    assert_type(ring.ranks, tuple[int, ...])
    assert_type(ring.device, torch.device)
    assert_type(ring.stream, torch.cuda.Stream | None)
    assert_type(commlib.comm("pair"), commlib.CommContext)
    pair = commlib.new_ring(1, range(2), timeout=30, name="pair")
    assert_type(pair, commlib.CommContext | None)
    print(pair.rank)  # refused: None on ranks that are not members
    if pair is not None:
        print(pair.rank)
        pair.close(timeout=1.5)
    commlib.init(backend=3)  # refused
    commlib.new_ring("pair", [0, 1])  # refused: the number of a ring
    commlib.new_ring(2, 3)  # refused: not a sequence of ranks
    commlib.new_ring(2, [0, 1], backend="nccl")  # refused: no such argument
    commlib.CommContextManager.instance().get(0).missing()  # refused
    return ring


def collectives(x: Tensor, ring: commlib.CommContext, sync_op: bool) -> None:
    """Call operators in their three forms: with a result, with a Work, with a variable."""
    assert_type(ops.all_reduce(x), Tensor)
    assert_type(ops.all_reduce(x, ring, op="max", sync_op=True), Tensor)
    assert_type(ops.all_reduce(x, op=torch.distributed.ReduceOp.SUM), Tensor)
    assert_type(ops.all_reduce(x, "pair", op="premul_sum", factor=0.5), Tensor)
    assert_type(ops.all_reduce(x, use_calc_stream=False, sync_op=False), commlib.Work[Tensor])
    maybe = ops.all_reduce(x, use_calc_stream=False, sync_op=sync_op)
    assert_type(maybe, Tensor | commlib.Work[Tensor])
    assert_type(ops.all_reduce_(x, op="AVG"), Tensor)
    for gather in (ops.all_gather, ops.all_to_all, ops.reduce_scatter, ops.partial_all_gather):
        assert_type(gather(x), Tensor)
        assert_type(gather(x, use_calc_stream=False, sync_op=False), commlib.Work[Tensor])
    for rooted in (ops.broadcast, ops.reduce, ops.gather, ops.scatter):
        assert_type(rooted(x, root=1), Tensor)
        begun = rooted(x, 1, root=1, use_calc_stream=False, sync_op=False)
        assert_type(begun, commlib.Work[Tensor])
    assert_type(ops.broadcast_(x, root=1), Tensor)
    assert_type(ops.reduce_(x, op="min", root=1), Tensor)
    assert_type(ops.barrier(), None)
    assert_type(ops.barrier(use_calc_stream=False, sync_op=False), commlib.Work[None])
    assert_type(ops.send(x, peer=1), None)
    assert_type(ops.send(x, peer=1, use_calc_stream=False, sync_op=False), commlib.Work[None])
    sent = ops.send(x, peer=1, use_calc_stream=False, sync_op=sync_op)
    assert_type(sent, commlib.Work[None] | None)
    assert_type(ops.recv(x, peer=0), Tensor)
    assert_type(ops.recv(x, peer=0, use_calc_stream=False, sync_op=False), commlib.Work[Tensor])
    assert_type(ops.partial_send(x, peer=1, num=2, id=0), None)
    assert_type(ops.partial_recv(x, peer=0, num=2, id=0), Tensor)
    work = ops.all_gather(x, use_calc_stream=False, sync_op=False)
    assert_type(work.done(), bool)
    assert_type(work.wait(), Tensor)
    with ring.group(use_calc_stream=False, sync_op=False) as group:
        ops.send(x, peer=1)
        assert_type(group, commlib.Work)


def methods(x: Tensor, ring: commlib.CommContext, sync_op: bool) -> None:
    """Call methods of a ring: lists of tensors, objects, deadlines, new rings."""
    parts = [x, x]
    assert_type(ring.all_gather(parts, x, timeout=5), list[Tensor])
    assert_type(ring.all_gather(x), Tensor)
    work = ring.all_gather(parts, x, use_calc_stream=False, sync_op=False)
    assert_type(work, commlib.Work[list[Tensor]])
    assert_type(work.wait(timeout=datetime.timedelta(seconds=5)), list[Tensor])
    assert_type(ring.all_to_all(parts, parts), list[Tensor])
    assert_type(ring.reduce_scatter(x, parts, op="premul_sum", factor=0.5), Tensor)
    assert_type(ring.reduce_scatter(x, op=torch.distributed.ReduceOp.AVG), Tensor)
    assert_type(ring.broadcast(x, root=0), Tensor)
    assert_type(ring.reduce(x, root=0, op="BOR"), Tensor)
    largest = torch.distributed.ReduceOp(torch.distributed.ReduceOp.MAX)
    assert_type(ring.all_reduce(x, op=largest), Tensor)
    assert_type(ring.gather(x, root=0), Tensor)
    assert_type(ring.scatter(x, root=0, use_calc_stream=False, sync_op=False), commlib.Work[Tensor])
    assert_type(ring.all_to_all(x), Tensor)
    assert_type(
        ring.all_to_all(x, x, use_calc_stream=False, sync_op=sync_op), Tensor | commlib.Work[Tensor]
    )
    ring.all_to_all(parts)  # refused: lists come in pairs
    ring.all_gather(parts)  # refused: a list and no input
    ring.gather(parts, root=0)  # refused: a list and no input
    ring.gather(None, root=0)  # refused: no input
    ring.reduce(None, root=0)  # refused: no input
    assert_type(ring.scatter(x, parts if sync_op else None, root=0), Tensor)
    assert_type(ring.gather(None, x, root=1), None)
    assert_type(ring.all_gather_object(3), list[int])
    assert_type(ring.gather_object("a", root=0), list[str] | None)
    assert_type(ring.broadcast_object(None, root=0), object)
    assert_type(ring.split(1, key=ring.rank), commlib.CommContext | None)
    ring.split("red")  # refused: not a whole number
    ring.all_to_all(parts, x)  # refused: a list and a tensor
    ring.barrier(timeout="soon")  # refused: not seconds


def operators(x: Tensor, label: Tensor, weight: Tensor, flag: bool) -> None:
    """Call operators whose result depends on an option."""
    assert_type(ops.softmax_with_cross_entropy(x, label), Tensor)
    both = ops.softmax_with_cross_entropy(x, label, return_softmax=True)
    assert_type(both, tuple[Tensor, Tensor])
    either = ops.margin_cross_entropy(x, label, return_softmax=flag)
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    assert_type(ops.class_center_sample(label, 100, 10), tuple[Tensor, Tensor])
    total, normal = ops.all_reduce_residual_norm(x, x, weight)
    assert_type((total, normal), tuple[Tensor, Tensor])
    assert_type(ops.fused_attention(x, weight, weight, "pair", num_heads=8), Tensor)
    assert_type(ops.fused_feedforward(x, weight, weight, activation="gelu"), Tensor)
    assert_type(ops.concat(ops.split(ops.identity(x))), Tensor)
    assert_type(ops.vocab_parallel_embedding(label, weight), Tensor)
    assert_type(ops.data_norm(x, label, label, label), Tensor)
    assert_type(
        ops.data_norm(x, label, label, label, return_moments=True), tuple[Tensor, Tensor, Tensor]
    )


def inference(x: Tensor, layers: list[DecoderLayer], config: DecoderConfig) -> None:
    """Run the layers of a decoder over a cache."""
    cache = ContiguousCache((x,), (x,))
    assert_type(ops.fused_multi_transformer(x, layers, cache, config=config, start=3), Tensor)
    ops.fused_multi_transformer(x, layers, cache)  # refused: no config
    ops.fused_multi_transformer(x, x, cache, config=config)  # refused: not layers


def experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Send rows to experts and back."""
    counts = ops.number_count(ids, 4)
    order = ops.assign_pos(ids, counts.cumsum(0))
    assert_type(ops.limit_by_capacity(counts, counts, 1), Tensor)
    assert_type(ops.prune_gate_by_capacity(ids, counts, 4, 1), Tensor)
    assert_type(ops.random_routing(ids, weights, weights[:, 0]), Tensor)
    rows = ops.global_scatter(x[order], counts, counts)
    assert_type(rows, Tensor)
    sent = ops.expert_dispatch(x, ids, 4, 16, weights=weights, on_overflow="drop")
    assert_type(sent.rows, Tensor)
    assert_type(sent.scales, Tensor | None)
    assert_type(ops.expert_combine(sent.rows, sent.handle), Tensor)
    ops.expert_combine(sent.rows, sent)  # refused: not a handle
    return ops.global_gather(rows, counts, counts, capacity=8)


def optimizers(model: torch.nn.Module, ring: commlib.CommContext) -> None:
    """Update a model by an optimizer with sharded state."""
    optimizer = ops.DistributedFusedLamb(model.parameters(), ring, lr=1e-3, max_grad_norm=1.0)
    assert_type(optimizer, ops.DistributedFusedLamb)
    assert_type(optimizer.step(), None)
    assert_type(optimizer.step(lambda: 1.0), float)
    assert_type(optimizer.skipped, Tensor)
    optimizer.load_state_dict(optimizer.state_dict())
    ops.DistributedFusedLamb(model.parameters(), ring, 1e-3)  # refused: options are keywords
    ops.DistributedFusedLamb(model.parameters(), momentum=0.9)  # refused: no such option


def wrong_calls(x: Tensor, ring: commlib.CommContext) -> None:
    """Call operators in ways that no rank can carry out."""
    ops.all_reduce([1.0, 2.0])  # refused: not a tensor
    ops.all_reduce(x, x)  # refused: the order of torch.distributed
    ops.all_reduce(x, op="median")  # refused: not a reduction
    ring.all_reduce(x, op="median")  # refused: not a reduction
    ops.all_reduce(x, ring, "sum")  # refused: options are keywords
    ops.all_reduce(x, sync_op=False).sum()  # refused: a Work is not a tensor
    ops.all_reduce(x).wait()  # refused: a tensor is not a Work
    count: int = ops.all_reduce(x)  # refused
    ops.broadcast(x, ring, 1)  # refused: options are keywords
    ops.reduce(x, root="0")  # refused: a position in the ring
    ops.send(x)  # refused: no peer
    ops.recv(peer=0)  # refused: no output
    ops.barrier(x)  # refused: a tensor is not a ring
    ops.allreduce(x)  # refused: no such operator
    print(count)


def legacy(x: Tensor) -> None:
    """Call legacy operators."""
    assert_type(compat.paddle.c_allreduce_sum(x, 0, use_calc_stream=True), Tensor)
    assert_type(compat.paddle.recv_v2([2, 3], "float32", peer=1), Tensor)
    assert_type(compat.paddle.c_sync_comm_stream(x, 0), Tensor)
    assert_type(compat.paddle.c_sync_comm_stream(), None)
    assert_type(compat.paddle.c_wait_compute([x, x]), list[Tensor])
    assert_type(compat.paddle.barrier(x), Tensor)
    assert_type(compat.paddle.barrier(ring_id=1), None)
    assert_type(compat.deepspeed.graph_process(True, norm, x, 2.0), Tensor)
    compat.deepspeed.graph_process(True, norm, x, "2")  # refused: the argument of norm
    compat.deepspeed.graph_process(True, norm)  # refused: no arguments
    compat.paddle.c_allreduce_sum(x, root_id=0)  # refused: no such argument
    compat.paddle.c_broadcast(x, root="0")  # refused: a position in the ring
    compat.horovod.allreduce(x)  # refused: no such dialect


def norm(x: Tensor, kind: float) -> Tensor:
    """Return the norm of ``x`` over all ranks."""
    return ops.all_reduce((x.abs() ** kind).sum()) ** (1 / kind)


def captured(x: Tensor) -> None:
    """Capture a function with arguments, and a module."""
    fast = graph.capture(norm, warmup=1, outputs="copy", tolerance=(1e-5, 1e-8))
    assert_type(fast(x, 2.0), Tensor)
    assert_type(fast(x, kind=2.0), Tensor)
    fast.reset()
    fast(x)  # refused: kind is missing
    fast(x, "2")  # refused: the argument of norm
    assert_type(step(x), Tensor)
    step(x, x)  # refused: one argument
    assert_type(Model().step(x, 3), Tensor)
    Model().step(3)  # refused: not a tensor
    assert_type(graph.capture(Model().plain)(x), Tensor)
    layer = graph.capture(torch.nn.Linear(2, 2))
    layer(x)
    print(list(layer.parameters()))
    graph.capture(torch.nn.Linear(2, 2), agree=0)(x)
    graph.capture(norm, warmup="2")  # refused: a number
    graph.capture(norm, warm_up=2)  # refused: no such option
    graph.capture(3)  # refused: not a function


class Model:
    @graph.capture
    def step(self, x: Tensor, n: int = 2) -> Tensor:
        """Return the sum."""
        return x * n

    def plain(self, x: Tensor) -> Tensor:
        """Return x."""
        return x


@graph.capture
def step(x: Tensor) -> Tensor:
    """Return the sum over the ranks."""
    return ops.all_reduce(x)


@graph.capture(on_fail="eager")
def slow_step(x: Tensor) -> Tensor:
    """Return the sum over the ranks."""
    return ops.all_reduce(x)


def main() -> None:
    """Run the program."""
    ring = start()
    x = torch.ones(4, device=ring.device)
    try:
        collectives(x, ring, sync_op=ring.rank == 0)
        captured(x)
    except errors.PeerTimeout:
        ring.reset()
    except errors.MissingError:  # refused
        raise
    flags.set("FLAGS_comm_timeout_s", 60)
    assert_type(flags.get("FLAGS_comm_timeout_s"), float)
    assert_type(flags.get("FLAGS_custom_allreduce"), bool)
    assert_type(flags.get("FLAGS_comm_async_blocks"), int)
    assert_type(flags.get("FLAGS_comm_run_token"), str)
    assert_type(flags.get("FLAGS_graph_verify"), int | str)
    assert_type(flags.rows()[0]["name"], str)
    assert_type(ring.report()["calls"], int)
    for report in commlib.CommContextManager.instance().report():
        assert_type(report["last"], str | None)
    package = export.aoti_load_package("block.pt2")
    assert_type(package.get_metadata(), dict[str, str])
    assert_type(package.get_constant_fqns(), list[str])
    package.load_constants({}, check_full_update=False)
    package.missing()  # refused
    ring.report()["call"]  # refused: no such key
    commlib.shutdown(abort=True)
    commlib.shutdown(True)  # refused: options are keywords


if __name__ == "__main__":
    main()
