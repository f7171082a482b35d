"""compat.paddle: the table of names, errors for unknown names, and the styles of a call."""

import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

import commlib
from commlib.compat import paddle
from commlib.compat.paddle.distributed.import_paths import PATHS
from commlib.compat.paddle.names import NEW_NAMES, NOT_PORTED
from commlib.compat.paddle.page import distributed_names, page
from commlib.compat.paddle.unported import FAMILIES, REASONS
from commlib.errors import ArgumentError
from tests.support.checks import assert_bits_equal, assert_equal, raises, sample
from tests.support.runs_on import runs_on

PAGE = Path(__file__).parent.parent / "docs" / "paddle.md"
SERVERS = ("distributed_lookup_table", "distributed_push_sparse", "pull_sparse", "push_dense")


def test_every_name_is_in_the_table() -> None:
    assert sorted(NEW_NAMES) == paddle.__all__
    assert not set(NOT_PORTED) & set(NEW_NAMES)


def test_the_page_shows_the_table() -> None:
    """`python -c "from commlib.compat.paddle.page import page; print(page(), end='')"`."""
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("name", NEW_NAMES)
def test_new_names_exist(name: str) -> None:
    path = NEW_NAMES[name][0]
    start: Any = torch if path.startswith("torch.") else commlib
    assert callable(reduce(getattr, path.removeprefix("torch.").split("."), start))


@pytest.mark.parametrize("name", SERVERS)
def test_servers_are_out_of_scope(name: str) -> None:
    with pytest.raises(AttributeError, match="parameter servers are out of scope"):
        getattr(paddle, name)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("c_allreduce_summ", "c_allreduce_sum"),
        ("c_all_gather", "c_allgather"),
        ("sendv2", "send_v2"),
    ],
)
def test_an_unknown_name_names_the_nearest(name: str, nearest: str) -> None:
    for style in (paddle, paddle._legacy_C_ops, paddle._C_ops):
        with pytest.raises(
            AttributeError, match=f"no attribute '{name}'; did you mean '{nearest}'"
        ):
            getattr(style, name)
    assert not hasattr(paddle, "zzz")


@runs_on("ranks")
def test_styles(comm: Any) -> None:
    """Pairs of attributes, keywords and positions are the same call."""
    x = sample(comm.rank, (4, 6), torch.float32).to(comm.device)
    pairs, plain = paddle._legacy_C_ops, paddle._C_ops
    want = plain.c_concat(x, comm.rank, comm.size, 0, True, True)
    attributes = ("ring_id", 0, "use_calc_stream", True, "rank", comm.rank, "nranks", comm.size)
    assert_bits_equal(pairs.c_concat(x, *attributes, "use_model_parallel", True), want)
    assert_bits_equal(pairs.c_concat(x, *attributes, "op_role", 1, "op_device", ""), want)
    label = torch.tensor([[1], [2], [3], [0]], device=comm.device)
    softmax, loss = pairs.c_softmax_with_cross_entropy(x, label, "ring_id", 0)
    for got, one in zip((softmax, loss), plain.c_softmax_with_cross_entropy(x, label), strict=True):
        assert_bits_equal(got, one)
    peer = 1 - comm.rank
    if comm.rank:
        pairs.send_v2(x, "ring_id", 0, "peer", peer, "use_calc_stream", True)
    else:
        shape = ("out_shape", [4, 6], "dtype", 5)
        got = pairs.recv_v2(*shape, "peer", peer, "use_calc_stream", True)
        assert_bits_equal(got, sample(peer, (4, 6), torch.float32))


@runs_on("ranks")
def test_the_same_tensor_as_input_and_output(comm: Any) -> None:
    """An operator that is given x twice works in place, as its form with an underscore."""
    for call in ("c_allreduce_sum", "c_allreduce_sum_"):
        x = torch.full((3,), float(comm.rank + 1), device=comm.device)
        tensors = (x,) if call.endswith("_") else (x, x)
        arguments = ("use_calc_stream", True, "ring_id", 0)
        result = getattr(paddle._legacy_C_ops, call)(*tensors, *arguments)
        assert_equal((result is x, x.tolist()), (True, [3.0] * 3), call)
    x = torch.ones(1, device=comm.device)
    assert_equal(paddle._legacy_C_ops.barrier(x, x, "ring_id", 0).tolist(), [2.0], "barrier")
    for name in ("partial_allgather", "partial_allgather_"):
        x = torch.full((4,), float(comm.rank), device=comm.device)
        sizes = ("nranks", comm.size, "rank", comm.rank, "use_calc_stream", True)
        assert getattr(paddle._legacy_C_ops, name)(x, x, *sizes) is x
        assert_equal(x.tolist(), [0.0, 0.0, 1.0, 1.0], name)


@runs_on("cpu_ranks")
def test_wrong_pairs(comm: Any) -> None:
    x, pairs = torch.ones(2), paddle._legacy_C_ops
    with raises(ArgumentError, "c_identity: arguments ('ring_id',)", "pairs"):
        pairs.c_identity(x, "ring_id")
    with raises(ArgumentError, "pairs", "'ring_id', 0"):
        pairs.c_identity(x, "ring_id", 0, True, "use_calc_stream")
    with raises(ArgumentError, "attribute 'ringid'; expected one of x, ring_id"):
        pairs.c_identity(x, "ringid", 0)
    with raises(ArgumentError, "c_scatter: 2 tensors before the attributes", "its input twice"):
        pairs.c_scatter(x, x + 1, "ring_id", 0)
    with raises(ArgumentError, "c_identity: 0 before the first attribute"):
        pairs.c_identity(x, 0)


def test_rows_are_whole() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    tables = NEW_NAMES, distributed_names(), PATHS, REASONS, FAMILIES
    assert len(rows) == sum(map(len, tables))
    assert all(re.fullmatch(r"\| `[\w.…]+` \|( `[\w.]+` \|)? \S.* \|", row) for row in rows)
