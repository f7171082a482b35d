"""compat.paddle.distributed: pipeline stages exchange activations and gradients."""

from functools import partial
from typing import Any

import torch

import commlib.compat.paddle.distributed as dist
from commlib import graph
from commlib.compat.paddle.distributed import fleet, pp_utils
from commlib.errors import ArgumentError, ShapeError
from tests.support.checks import assert_bits_equal, assert_equal, raises, sample
from tests.support.operator import calls
from tests.support.paddle_groups import own_groups
from tests.support.ranks import NewRanks
from tests.support.runs_on import runs_on

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]


def two_stages() -> fleet.HybridCommunicateGroup:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2}
    fleet.init(is_collective=True, strategy=strategy)
    return fleet.get_hybrid_communicate_group()


def drawn(seed: int, ring: Any) -> Tensor:
    """Return the same values on every rank."""
    return sample(0, (4, 4), torch.float64, seed).to(ring.device)


def reference(ring: Any, count: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of both stages' weights over all micro-batches, on one rank."""
    first, second = drawn(0, ring).requires_grad_(), drawn(1, ring).requires_grad_()
    for batch in range(count):
        out = torch.tanh(drawn(2 + batch, ring) @ first) @ second
        (out * out).sum().backward()
    assert first.grad is not None and second.grad is not None
    return first.grad, second.grad


@runs_on("ranks")
def test_two_stages_train_as_one_process(ring: Any) -> None:
    """Micro-batches one by one, and with a forward and a backward in each exchange."""
    with own_groups():
        hybrid = two_stages()
        first, last = hybrid.is_first_stage, hybrid.is_last_stage
        for use_cache in (True, False):
            helper = pp_utils.P2pHelper(use_cache)
            weight = drawn(ring.rank, ring).requires_grad_()

            def stage(x: Any, weight: Tensor = weight) -> Tensor:
                return x @ weight if last else torch.tanh(x @ weight)

            for batch in range(3):
                x: Any = drawn(2 + batch, ring) if first else helper.recv_forward(first)
                assert_equal(x.requires_grad, not first, "what requires grad there does here")
                out = stage(x)
                if batch == 1:  # both in one call
                    grad = helper.send_forward_recv_backward(out, last)
                else:
                    helper.send_forward(out, last)
                    grad = helper.recv_backward(last)
                out.backward((2 * out).detach() if last else grad)
                helper.send_backward(x.grad, first)
            want = reference(ring, 3)[ring.rank]
            assert_bits_equal(weight.grad, want, f"use_cache={use_cache}", atol=1e-12)


@runs_on("ranks")
def test_tuples_and_both_directions(ring: Any) -> None:
    """Stage 0 sends two tensors; gradients exist for the one that requires grad."""
    with own_groups():
        two_stages()
        helper, me = pp_utils.P2pHelper(), ring.rank
        ids = torch.arange(3, device=ring.device)
        x = drawn(5, ring).requires_grad_()
        if me == 0:
            helper.send_forward((x, ids), False)
            got, grads = helper.send_forward_backward_recv_forward_backward(
                (x + 1, ids + 1), None, recv_prev=False, recv_next=True
            )
            assert_equal(got, None, "nothing comes from before the first stage")
            assert isinstance(grads, tuple)
            assert_equal(len(grads), 1, "gradients")
            assert_bits_equal(grads[0], drawn(6, ring), "the gradient")
            return
        before: Any = helper.recv_forward(False)
        assert_bits_equal(before[1], ids, "the second tensor")
        assert_equal([one.requires_grad for one in before], [True, False], "requires_grad")
        later: Any = helper.send_backward_recv_forward((drawn(6, ring),), False)
        assert_bits_equal(later[0].detach(), (x + 1).detach(), "the next input")
        assert_bits_equal(later[1], ids + 1, "its second tensor")


@runs_on("ranks")
def test_one_neighbour_on_both_sides(ring: Any) -> None:
    """Two stages in a circle, as virtual stages are: an input and a gradient from one rank."""
    with own_groups():
        two_stages()
        helper, other = pp_utils.P2pHelper(), 1 - ring.rank
        out = torch.full((2,), 10.0 + ring.rank, device=ring.device, requires_grad=True)
        grad = torch.full((2,), 100.0 + ring.rank, device=ring.device)
        for _ in range(2):
            got: Any = helper.send_forward_backward_recv_forward_backward(out, grad, True, True)
            assert_equal(got[0].tolist(), [10.0 + other] * 2, "the input")
            assert_equal(got[1].tolist(), [100.0 + other] * 2, "the gradient")


@runs_on("ranks")
def test_gradients_of_changing_shapes(ring: Any) -> None:
    """Two outputs are under way before the first gradient, and one that needs no gradient."""
    with own_groups():
        two_stages()
        helper, lengths = pp_utils.P2pHelper(use_cache=False), (2, 3)
        if ring.rank == 0:
            helper.send_forward(torch.ones(7, device=ring.device), False)
            for length in lengths:
                helper.send_forward(drawn(5, ring)[0, :length].requires_grad_(), False)
            grads: list[Any] = [helper.recv_backward(False) for _ in lengths]
            assert_equal([one.tolist() for one in grads], [[2.0] * 2, [3.0] * 3], "gradients")
            with raises(ArgumentError, "or that does not require grad", "call send_forward first"):
                helper.recv_backward(False)
            return
        inputs: list[Any] = [helper.recv_forward(False) for _ in range(3)]
        assert_equal([tuple(one.shape) for one in inputs], [(7,), (2,), (3,)], "inputs")
        for length in lengths:
            helper.send_backward(torch.full_like(drawn(5, ring)[0, :length], length), False)


@runs_on("ranks")
def test_evaluation_between_steps_of_training(ring: Any) -> None:
    """Outputs without grad have the known form, also gradients after them; not the reverse."""
    with own_groups():
        two_stages()
        helper, x = pp_utils.P2pHelper(), drawn(5, ring)
        for train in (True, False, True):
            if ring.rank == 0:
                helper.send_forward(x.clone().requires_grad_(train), False)
                grad: Any = helper.recv_backward(False) if train else x
                assert_bits_equal(grad, x, "the gradient")
            else:
                assert_bits_equal(helper.recv_forward(False), x, f"training is {train}", atol=0)
                helper.send_backward(x if train else None, False)
        helper.clear_meta_cache()
        if ring.rank == 0:
            helper.send_forward(x, False)
            with raises(ShapeError, "clear_meta_cache()"):
                helper.send_forward(x.clone().requires_grad_(), False)
        else:
            helper.recv_forward(False)


@runs_on("cpu_ranks")
def test_captured_on_a_cpu(ring: Any) -> None:
    """Known forms are part of the graph; forms that each call reads are an error on both sides."""
    with own_groups():
        two_stages()
        helpers = pp_utils.P2pHelper(), pp_utils.P2pHelper(use_cache=False)

        def passed(x: Tensor, helper: pp_utils.P2pHelper) -> Any:
            if ring.rank == 1:
                return helper.recv_forward(False)
            helper.send_forward(x * 2, False)
            return x * 2

        static, read = (
            graph.capture(partial(passed, helper=one), outputs="copy") for one in helpers
        )
        for seed in range(4):
            x = drawn(seed, ring)
            assert_bits_equal(static(x), x * 2, f"replay {seed}")
        with raises(ArgumentError, "use_cache=False inside a capture", "use_cache=True"):
            read(x)


LENGTHS = (2, 3, 5)


def one_step(ring: Any, helper: pp_utils.P2pHelper, seed: int) -> list[Any]:
    """Send micro-batches of several lengths, and then their gradients; return what has come."""
    helper._dynamic_cnt = 0  # as upstream's pipelines
    batches = [drawn(seed, ring).flatten()[:length].requires_grad_() for length in LENGTHS]
    if ring.rank == 0:
        for x in batches:
            helper.send_forward_recv_forward((x, x.detach().int()), False)
        return [helper.send_backward_recv_backward(None, True) for _ in batches]
    inputs: list[Any] = [helper.recv_forward(False)]
    inputs += [helper.send_forward_recv_forward(None, True) for _ in batches[1:]]
    for x, _ in inputs:
        helper.send_backward_recv_backward((x.detach() * 2,), False)
    return inputs


@runs_on("ranks")
def test_dynamic_shapes(ring: Any) -> None:
    """Each call has the form of the first step; without the cache it may change."""
    with own_groups():
        pipe: Any = two_stages().get_pipe_parallel_group().ring
        for use_cache, messages in ((True, 0), (False, 6)):
            helper, launched = pp_utils.P2pHelper(use_cache, dynamic_shape=True), []
            for seed in range(3):
                before = calls(pipe)
                for length, got in zip(LENGTHS, one_step(ring, helper, seed), strict=True):
                    want = drawn(seed, ring).flatten()[:length]
                    if ring.rank == 0:
                        assert_equal(len(got), 1, "gradients of what requires grad")
                        assert_bits_equal(got[0], want * 2, f"gradients of {length}")
                        continue
                    assert_equal([one.requires_grad for one in got], [True, False], "marks")
                    assert_bits_equal(got[0].detach(), want, f"the input of {length}")
                    assert_bits_equal(got[1], want.int(), "the second tensor")
                launched.append(calls(pipe) - before)
            assert_equal(launched[0] - launched[1], 6 - messages, "messages of later steps")
            assert_equal(launched[1], launched[2], "launches of later steps")
        helper = pp_utils.P2pHelper(dynamic_shape=True)
        one_step(ring, helper, 0)
        helper._dynamic_cnt = 0
        if ring.rank == 0:
            with raises(ShapeError, "(4, 4)", "(2,)", "clear_meta_cache()"):
                helper.send_forward(drawn(0, ring).requires_grad_(), False)


@runs_on("ranks")
def test_calls_on_the_comm_stream(ring: Any) -> None:
    """Tensors are whole, and the caller of an overlapping call waits for its tasks."""
    with own_groups():
        two_stages()
        helper: Any = pp_utils.P2pHelper()
        x, plain = drawn(5, ring).requires_grad_(), None
        if ring.rank == 0:
            plain, tasks = helper.send_forward_recv_forward(x, False, False, True)
            tasks[0].wait()
            grad, tasks = helper.send_backward_recv_backward(None, True, False, True)
            tasks[0].wait()
            assert_bits_equal(grad, x.detach() + 1, "gradients")
            helper.send_forward(x, False, batch_p2p_comm=False)
        else:
            got, tasks = helper.send_forward_recv_forward(None, True, False, True)
            assert_equal(len(tasks), 1, "tasks")
            tasks[0].wait()
            assert_bits_equal(got.detach(), x.detach(), "the input")
            helper.send_backward_recv_backward(got.detach() + 1, False, batch_p2p_comm=False)
            later: Any = helper.recv_forward(False, batch_p2p_comm=False)
            assert_bits_equal(later.detach(), x.detach(), "the next input, without a task")
        assert_equal(plain, None, "nothing comes from before the first stage")
        neither = helper.send_forward_recv_forward(None, False, True, overlap_p2p_comm=True)
        assert_equal(neither, (None, None), "no tasks on the current stream")


@runs_on("ranks")
def test_what_stages_can_not_send(ring: Any) -> None:
    with own_groups():
        pipe: Any = two_stages().get_pipe_parallel_group().ring
        helper: Any = pp_utils.P2pHelper()
        before, wrong = calls(pipe), {"x": drawn(5, ring)}
        for output, words in (
            (wrong, "sends ['dict']"),
            ([drawn(5, ring), 3], "sends ['int']"),
            (torch.ones(2, device=ring.device).to(torch.float8_e5m2), "torch.float8_e5m2"),
        ):
            with raises(ArgumentError, words, "expected a tensor or a tuple of tensors"):
                helper.send_forward(output, False)
        assert_equal(calls(pipe), before, "calls launched by refused ones")
        if ring.rank == 0:
            helper.send_forward([drawn(5, ring), drawn(6, ring)], False)
        else:
            got: Any = helper.recv_forward(False)
            assert_equal((type(got), len(got)), (tuple, 2), "a list arrives as a tuple")


@runs_on("ranks")
def test_wrong_outputs(ring: Any) -> None:
    with own_groups():
        two_stages()
        helper, x = pp_utils.P2pHelper(), drawn(5, ring)
        with raises(ArgumentError, "an output that was not sent", "call send_forward first"):
            helper.recv_backward(False)
        many = tuple(x[0] for _ in range(60))
        with raises(ShapeError, "60 tensors", "at most 128", f"rank {ring.rank}"):
            helper.send_forward(many, False)
        if ring.rank == 0:
            helper.send_forward(x, False)
            with raises(ShapeError, "(2, 4)", "(4, 4)", "clear_meta_cache()"):
                helper.send_forward(x[:2], False)
            helper.clear_meta_cache()
            helper.send_forward(x[:2], False)
            return
        helper.recv_forward(False)
        helper.clear_meta_cache()
        again: Any = helper.recv_forward(False)
        assert_bits_equal(again, x[:2].clone(), "after clear_meta_cache")
        assert_equal(dist.get_world_size(), 2, "both stages are there")


def four(ring: Any) -> None:
    """Two stages of two tensor-parallel ranks: each sends half, both get the whole."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2, "mp_degree": 2}
    strategy.tensor_parallel_configs = {"tensor_init_seed": 3}
    fleet.init(is_collective=True, strategy=strategy)
    hybrid = fleet.get_hybrid_communicate_group()
    model: Any = hybrid.get_model_parallel_group()
    assert_equal(model.ranks, [[0, 1], [2, 3]][ring.rank // 2], "the last axis changes fastest")
    assert_equal(hybrid.get_pipe_parallel_group().ranks, [ring.rank % 2, ring.rank % 2 + 2])
    assert_equal(hybrid.get_check_parallel_group().ranks, [0, 1, 2, 3], "check group")
    helper, first = pp_utils.P2pHelper(), hybrid.is_first_stage
    layer = fleet.meta_parallel.RowParallelLinear(4, 4).double()
    halves = torch.empty(2, *layer.weight.shape, dtype=torch.float64)
    model.ring.all_gather(halves, layer.weight.detach())
    x: Any = drawn(5, ring) if first else helper.recv_forward(first)
    out = layer(x)
    assert_bits_equal(out.detach(), x.detach() @ torch.cat([*halves]), "a stage", atol=1e-12)
    helper.send_forward(out, not first)
    grad = helper.recv_backward(not first)
    out.backward((2 * out).detach() if not first else grad)
    helper.send_backward(x.grad, first)
    entries: list[Any] = []
    dist.all_gather_object(entries, (out.detach(), x.grad if not first else grad))
    assert_bits_equal(entries[0][0], entries[1][0], "both ranks of a stage have one output")
    assert_bits_equal(entries[0][1], entries[2][1], "the gradient of the second stage's input")


def test_four_ranks(new_ranks: NewRanks) -> None:
    with new_ranks(4) as ranks:
        ranks(four)
