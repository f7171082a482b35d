"""The public names: these and no others, each documented, every operator called the same way."""

import inspect

import pytest

import commlib
from commlib import compat, errors, export, flags, graph, ops
from commlib.compat import c10d, deepspeed, paddle
from commlib.ops import inference
from tests.support.processes import run

PUBLIC = [
    "CommContext",
    "CommContextManager",
    "Work",
    "close_ring",
    "comm",
    "compat",
    "errors",
    "export",
    "flags",
    "graph",
    "init",
    "new_ring",
    "ops",
    "ring_from_group",
    "shutdown",
]
CLASSES = (commlib.CommContext, commlib.CommContextManager, commlib.Work)
MODULES = (commlib, c10d, compat, deepspeed, errors, export, flags, graph, inference, ops, paddle)
RINGLESS = {  # local: no communication; expert_combine takes the ring of its handle
    "assign_pos",
    "expert_combine",
    "limit_by_capacity",
    "number_count",
    "prune_gate_by_capacity",
    "random_routing",
    "vocab_parallel_embedding",
}
# How many tensors an operator takes in front of the ring, where it is not one.
TENSORS = {
    "all_reduce_residual_norm": 3,
    "barrier": 0,
    "class_center_sample": 3,
    "data_norm": 4,
    "expert_dispatch": 4,  # two tensors and two numbers
    "fused_attention": 3,
    "fused_feedforward": 3,
    "fused_multi_transformer": 3,
    "global_gather": 3,
    "global_scatter": 3,
    "margin_cross_entropy": 2,
    "softmax_with_cross_entropy": 2,
}
CLASS_OPERATORS = [name for name in ops.__all__ if isinstance(getattr(ops, name), type)]
# ``split`` of a ring forms new rings, and that of operators cuts a tensor.
VERBS = [name for name in ops.__all__ if hasattr(commlib.CommContext, name) and name != "split"]


def test_public_names() -> None:
    assert commlib.__all__ == PUBLIC


@pytest.mark.parametrize(
    "name", ["graph.capture", "compat.paddle.c_broadcast", "compat.deepspeed.graph_process", "ops"]
)
def test_import_commlib_is_enough(name: str) -> None:
    code, _, err = run("-c", f"import commlib; commlib.{name}")
    assert code == 0, err


def test_import_commlib_leaves_graphs_and_dialects_out() -> None:
    show = "print([m for m in sys.modules if m.startswith(('commlib.graph', 'commlib.compat'))])"
    assert run("-c", f"import sys, commlib; {show}")[1] == "[]\n"


@pytest.mark.parametrize("module", [commlib, compat], ids=lambda module: module.__name__)
def test_other_names_are_no_attributes(module: object) -> None:
    with pytest.raises(AttributeError, match=r"module 'commlib.*no attribute 'nothing'"):
        module.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_all_is_sorted(module: object) -> None:
    assert module.__all__ == sorted(module.__all__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_is_documented(module: object) -> None:
    names = module.__all__  # type: ignore[attr-defined]
    bare = [name for name in names if not inspect.getdoc(getattr(module, name))]
    assert not bare


@pytest.mark.parametrize("public", CLASSES)
def test_every_public_method_is_documented(public: type) -> None:
    members = {n: m for n, m in vars(public).items() if callable(m) or isinstance(m, property)}
    bare = [n for n, m in members.items() if not n.startswith("_") and not m.__doc__]
    assert not bare


@pytest.mark.parametrize("name", sorted(set(ops.__all__) - {*CLASS_OPERATORS}))
def test_operators_sit_in_files_of_their_name(name: str) -> None:
    module = getattr(ops, name).__module__
    assert module.startswith("commlib.ops.") and module.endswith(f"._{name.rstrip('_')}")


@pytest.mark.parametrize("name", CLASS_OPERATORS)
def test_classes_take_the_ring_after_their_tensors(name: str) -> None:
    parameters = [*inspect.signature(getattr(ops, name)).parameters.values()]
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == ["params", "ring_id"]
    assert parameters[1].default == 0


@pytest.mark.parametrize("name", sorted(set(ops.__all__) - RINGLESS - {*CLASS_OPERATORS}))
def test_operators_take_the_ring_last_and_the_rest_by_keyword(name: str) -> None:
    parameters = dict(inspect.signature(getattr(ops, name)).parameters)
    ring = parameters.pop("ring_id")
    positional = [p for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]

    assert ring.default == 0
    assert ring.kind is ring.POSITIONAL_OR_KEYWORD
    assert len(positional) == TENSORS.get(name, 1)
    assert parameters["use_calc_stream"].default is True


@pytest.mark.parametrize("name", VERBS)
def test_verbs_can_return_a_work(name: str) -> None:
    sync_op = inspect.signature(getattr(ops, name)).parameters["sync_op"]
    assert sync_op.kind is sync_op.KEYWORD_ONLY
    assert sync_op.default is True


def test_every_error_has_the_one_root() -> None:
    strangers = [n for n in errors.__all__ if not issubclass(getattr(errors, n), errors.CommError)]
    assert not strangers
