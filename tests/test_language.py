"""Plain words: docstrings, comments, messages and documents avoid a list of expressions."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("commlib", "ops", "compat", "tools", "tests", "examples")
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md")
PENDING: tuple[str, ...] = (  # prefixes of paths that still use some of the expressions
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "commlib/core/",
    "commlib/engines/",
    "commlib/errors.py",
    "commlib/flags.py",
    "commlib/graph/bindings.py",
    "commlib/graph/capture.py",
    "commlib/graph/engine.py",
    "commlib/graph/entry.py",
    "commlib/graph/generators.py",
    "commlib/graph/graphed.py",
    "commlib/graph/graphed_module.py",
    "commlib/graph/ledger.py",
    "commlib/graph/outputs.py",
    "commlib/graph/overlap.py",
    "commlib/graph/pieces.py",
    "commlib/graph/pool.py",
    "commlib/graph/python_state.py",
    "commlib/graph/reach.py",
    "commlib/graph/real_call.py",
    "commlib/graph/refuse.py",
    "commlib/graph/signature.py",
    "commlib/graph/slots.py",
    "commlib/graph/step.py",
    "commlib/graph/stopwatch.py",
    "commlib/graph/verify.py",
    "commlib/graph/warmup.py",
    "commlib/p2p/",
    "compat/",
    "docs/",
    "examples/",
    "ops/",
    "tests/models/",
    "tests/programs/",
    "tests/support/",
    "tests/test_bad_input.py",
    "tests/test_bench.py",
    "tests/test_bench_allreduce.py",
    "tests/test_bench_capture.py",
    "tests/test_class_center_sample.py",
    "tests/test_comm_check.py",
    "tests/test_compat_deepspeed.py",
    "tests/test_compat_paddle.py",
    "tests/test_compat_paddle_data_norm.py",
    "tests/test_custom_allreduce.py",
    "tests/test_data_norm.py",
    "tests/test_exchange_rows.py",
    "tests/test_flags.py",
    "tests/test_global_scatter_gather.py",
    "tests/test_gpu_sharing.py",
    "tests/test_graph.py",
    "tests/test_graph_calls.py",
    "tests/test_graph_grads.py",
    "tests/test_graph_hazards.py",
    "tests/test_graph_host.py",
    "tests/test_graph_nested.py",
    "tests/test_graph_noise.py",
    "tests/test_graph_surroundings.py",
    "tests/test_graph_values.py",
    "tests/test_graph_verify.py",
    "tests/test_group.py",
    "tests/test_kernels.py",
    "tests/test_layers.py",
    "tests/test_manager.py",
    "tests/test_modes.py",
    "tests/test_moe_helpers.py",
    "tests/test_partial.py",
    "tests/test_push_host.py",
    "tests/test_push_protocol.py",
    "tests/test_ranks.py",
    "tests/test_tools.py",
    "tests/test_work.py",
    "tools/",
)
SUGGESTIONS = {
    r"behind(?! (a|the) (firewall|proxy|NAT))": "after",
    r"beside": "in addition to, also",
    r"anew": "again",
    r"whoever": "the rank that",
    r"lies": "is in, is at",
    r"stands": "is, represents",
    r"lets? go|letting go": "release, free, drop",
    r"told": "notified, informed",
    r"hears?": "receives, is notified of",
    r"(without|says|said) a word": "silently; a message",
    r"(?<!there )(is|are|was|were) no (?!longer|more|less|later|earlier|fewer|wider)": "is not a",
    r"of (its|their|our) own": "its own X, separate",
    r"(?<=; )type": "call, pass, set, use",
}


def files() -> list[str]:
    """Return every checked file by its path from the root, each once."""
    patterns = [*(f"{folder}/**/*.py" for folder in FOLDERS), *DOCUMENTS]
    found = {path.resolve() for pattern in patterns for path in ROOT.glob(pattern)}
    names = {path.relative_to(ROOT).as_posix() for path in found - {Path(__file__).resolve()}}
    return sorted(name for name in names if not name.startswith(PENDING))


def texts(name: str) -> Iterator[tuple[int, str]]:
    """Yield the comments and strings of a program, or the prose of a document, with their lines."""
    text = (ROOT / name).read_text()
    if name.endswith(".md"):
        yield 1, re.sub(r"(?ms)^```.*?^```", lambda code: "\n" * code[0].count("\n"), text)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@pytest.mark.parametrize("name", files())
def test_plain_words(name: str) -> None:
    wrong = [
        f"{name}:{line + text.count(chr(10), 0, match.start())}: {match[0]!r}; write: {suggestion}"
        for line, text in texts(name)
        for words, suggestion in SUGGESTIONS.items()
        for match in re.finditer(rf"\b({words})\b", text, re.IGNORECASE)
    ]
    assert not wrong, "\n".join(wrong)
