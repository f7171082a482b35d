"""Operators that are imported when they are first used: the same names, ops and compiled code."""

from pathlib import Path

import pytest

from commlib import ops
from commlib.ops.registered import late
from tests.support.processes import run

OPS = """
import commlib, torch
def ops():
    found = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("commlib::") for name in found if name.startswith("commlib::")}
before = ops() - {"run_package"}
"""
TRACED = """
import sys, torch, commlib
from commlib import ops
torch.manual_seed(0)
commlib.init("gloo")
logits, label = torch.randn(4, 8, requires_grad=True), torch.tensor([1, 2, 3, 4])
def calls(x):
    table = [torch.full((8,), value) for value in (4.0, 8.0, 16.0)]
    x = ops.all_reduce(x) * 2
    count = ops.number_count(label, 8)
    return ops.softmax_with_cross_entropy(x, label).sum() + ops.data_norm(x, *table).sum(), count
traced = torch.compile(calls, backend="aot_eager", fullgraph=True)
assert "commlib.ops.classification" not in sys.modules
found = traced(logits)
found[0].backward()
gradient, logits.grad = logits.grad, None
expected = calls(logits)
expected[0].backward()
assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
assert torch.equal(gradient, logits.grad)
commlib.shutdown()
"""


def test_import_commlib_leaves_them_out() -> None:
    show = f"print(sorted(set(sys.modules) & set({list(late.OPERATORS.values())})))"
    assert run("-c", f"import sys, commlib; {show}")[1] == "[]\n"


def test_the_table_has_every_late_op() -> None:
    code, out, err = run(
        "-c", f"{OPS}\nimport commlib.export\nprint(sorted(ops() - before - {{'run_package'}}))"
    )
    assert code == 0, err
    assert out == f"{sorted(late.OPS)}\n"


@pytest.mark.parametrize("module", sorted(set(late.OPS.values())))
def test_a_look_up_imports_the_op(module: str) -> None:
    """As a loaded program or cached generated code does."""
    names = [op for op, source in late.OPS.items() if source == module]
    show = f"print([str(getattr(torch.ops.commlib, op).default) for op in {names}])"
    code, out, err = run("-c", f"{OPS}\n{show}\nprint(before & set({names}))")
    assert code == 0, err
    assert out == f"{[f'commlib.{op}.default' for op in names]}\nset()\n"


def test_names_are_listed_before_they_are_imported() -> None:
    show = "print(commlib.ops.__all__ == dir(commlib.ops), 'commlib.ops.lamb' in sys.modules)"
    assert run("-c", f"import sys, commlib; {show}")[1] == "True False\n"


def test_the_table_names_operators() -> None:
    assert set(late.OPERATORS) <= set(ops.__all__)


def test_a_trace_imports_them() -> None:
    code, _, err = run("-c", TRACED, FLAGS_dynamic_static_unified_comm="1")
    assert code == 0, err


SAVED = """
import sys, torch, commlib
commlib.init(device="cpu")
def loss(x, label):
    return commlib.ops.softmax_with_cross_entropy(x, label)
inputs = torch.randn(3, 4), torch.tensor([[0], [1], [2]])
torch.jit.trace(loss, inputs, check_trace=False).save(sys.argv[1])
commlib.shutdown()
"""
LOADED = """
import sys, torch, commlib.export
commlib.init(device="cpu")
loss = torch.jit.load(sys.argv[1])
x, label = torch.randn(3, 4), torch.tensor([[0], [1], [2]])
assert torch.equal(loss(x, label), commlib.ops.softmax_with_cross_entropy(x, label))
commlib.shutdown()
"""


def test_a_saved_script_module_loads_in_a_new_process(tmp_path: Path) -> None:
    """As docs/compile.md says: torch looks the ops up in C++."""
    for program in (SAVED, LOADED):
        code, _, err = run("-c", program, str(tmp_path / "loss.pt"))
        assert code == 0, err
