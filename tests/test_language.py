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
    return sorted(names)


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
