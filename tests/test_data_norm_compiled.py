"""data_norm compiled, captured and on other streams: eager code's values and order."""

from typing import Any

import torch

from commlib import ops
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.operator import calls, compile_whole, generating
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on
from tests.test_data_norm import (
    DTYPES,
    KINDS,
    Tensors,
    data_norm,
    keywords,
    leaves,
    rows,
    summaries,
)


def stacked(x: torch.Tensor, columns: Tensors, **how: Any) -> Any:
    """Two layers that share their summaries, the way a compiled region may hold them."""
    y = data_norm(x, *columns[:3], **how)
    return data_norm(y, *columns[:3], **how)


def ways(comm: Any, backend: str, dtype: torch.dtype, cases: list[Any]) -> None:
    """Compiled code, both streams: eager's bits in results, gradients and summaries."""
    for kind, sync, streams in cases:
        results = []
        for call in (stacked, compile_whole(stacked, backend=backend)):
            for calc in streams:
                kwargs: dict[str, Any] = {"use_calc_stream": calc, "sync_stats": sync}
                leaf, *params = leaves(comm, rows(comm.rank, (5, 6), dtype), *summaries(6, dtype))
                if kind[0] == "gpu":  # compiled, what is updated may not want a gradient
                    params = [t.detach() for t in params]
                before = calls(comm)
                for _ in range(2):
                    y = call(leaf, params, **kwargs, **keywords(params, kind))
                    y.sum().backward()
                assert_equal(calls(comm) - before, 4 * sync, f"collectives {kind} {sync}")
                grads = [t.grad for t in (leaf, *params) if t.grad is not None]
                results.append([y, *params, *grads])
        for others in results[1:]:
            for other, first in zip(others, results[0], strict=True):
                assert_bits_equal(other, first, f"{dtype} {kind} sync_stats={sync}")


def test_streams_and_compiled(ranks: Ranks) -> None:
    both = (True, False)
    cases = [(KINDS[0], True, both), (KINDS[0], False, both), (KINDS[4], False, both)]
    ranks(ways, "aot_eager", torch.float64, cases, deadline=120)


def test_generated_code(unified_ranks: Ranks) -> None:
    generating(unified_ranks)(
        ways, "inductor", torch.float32, [(KINDS[0], True, (True,))], deadline=240
    )


@runs_on("cpu_ranks")
def test_compiled_refusal(comm: Any) -> None:
    """Not every torch can trace the update of a summary that wants a gradient."""
    leaf, *stats = leaves(comm, rows(0, (4, 3), torch.float64), *summaries(3, torch.float64)[:3])
    with raises(Exception, "requires_grad_(False)"):  # some torch wraps errors of traced code
        compile_whole(ops.data_norm)(leaf, *stats)


@runs_on("ranks", deadline=120)
def test_compiled_sizes(comm: Any) -> None:
    """One graph for changing sizes and rates; under no_grad nothing is updated, nothing agreed."""
    compiled = compile_whole(ops.data_norm, dynamic=True)
    stats = [t.to(comm.device) for t in summaries(6, torch.float32)[:3]]
    before, launched = [t.tolist() for t in stats], calls(comm)
    for count in (5, 8):
        x = rows(comm.rank, (count, 6), torch.float32).to(comm.device).requires_grad_()
        with torch.no_grad():
            if comm.rank == 0:  # one rank alone may evaluate
                assert_bits_equal(
                    compiled(x, *stats, sync_stats=True),
                    data_norm(x, *stats, sync_stats=True),
                    "compiled under no_grad",
                )
        decay = 1 / count
        y = compiled(x, *stats, sync_stats=False, summary_decay_rate=decay)
        y.sum().backward()
        want = [torch.tensor(b, device=comm.device) for b in before]
        data_norm(x.detach().requires_grad_(), *want, summary_decay_rate=decay).sum().backward()
        for got, one in zip(stats, want, strict=True):
            assert_bits_equal(got, one, f"{count} rows, dynamic")
        before = [t.tolist() for t in stats]
    assert_equal(calls(comm), launched, "collectives")


@runs_on("cpu_ranks")
def test_two_compiled_forwards(comm: Any) -> None:
    """Two forwards of one graph before the first backward: torch refuses the second backward."""
    compiled = compile_whole(ops.data_norm)
    stats = [t.to(comm.device) for t in summaries(3, torch.float64)[:3]]
    batches = [rows(n, (4, 3), torch.float64).to(comm.device).requires_grad_() for n in range(2)]
    first, second = (compiled(x, *stats) for x in batches)
    first.sum().backward()
    once = [t.tolist() for t in stats]
    with raises(RuntimeError, "modified by an inplace operation"):
        second.sum().backward()
    assert_equal([t.tolist() for t in stats], once, "summaries after the refused backward")


# -- on GPUs -------------------------------------------------------------------------------------


@runs_on("all_gpu_ranks", deadline=120)
def test_captured(comm: Any) -> None:
    """A captured forward and backward update the summaries at each replay, to eager's bits."""
    kinds: list[Any] = [(KINDS[0], True), (KINDS[0], False), (KINDS[4], False)]
    for dtype in DTYPES:
        for kind, sync in kinds:
            x, *params = leaves(comm, rows(0, (5, 6), dtype), *summaries(6, dtype))
            kwargs = {**keywords(params, kind), "sync_stats": sync}
            leaf, *others = (t.detach().clone().requires_grad_() for t in (x, *params))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = data_norm(x, *params[:3], **kwargs)
                y.sum().backward()
            for seed in range(3):
                drawn = rows(comm.rank, (5, 6), dtype, seed).to(comm.device)
                with torch.no_grad():
                    x.copy_(drawn)
                    leaf.copy_(drawn)
                graph.replay()
                for tensor in (leaf, *others):
                    tensor.grad = None
                again = {**keywords(others, kind), "sync_stats": sync}
                want = data_norm(leaf, *others[:3], **again)
                want.sum().backward()
                assert_bits_equal(y, want, f"{dtype} {kind}")
                assert_bits_equal(x.grad, leaf.grad, f"gradient {dtype} {kind}")
                for got, other in zip(params, others, strict=True):
                    assert_bits_equal(got, other, f"summaries {dtype} {kind}")
                    if other.grad is not None:
                        assert_bits_equal(got.grad, other.grad, f"their gradients {dtype} {kind}")
