"""Plain words: docstrings, comments, messages and documents avoid a list of expressions."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("commlib", "ops", "compat", "tools", "tests", "examples")
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md", "benchmarks/*.md")
KERNELS = ("commlib/p2p/csrc/*.cu*",)
SUGGESTIONS = {
    r"behind(?! (a|the) (firewall|proxy|NAT))": "after",
    r"beside": "in addition to, also",
    r"anew": "again",
    r"whoever": "the rank that",
    r"lies?": "is in, is at",
    r"stand in": "be captured, be in",
    r"stands": "is, represents",
    r"lets? go|letting go": "release, free, drop",
    r"told": "notified, informed",
    r"hears?": "receives, is notified of",
    r"(without|says|said) a word": "silently; a message",
    r"(?<!there )(is|are|was|were) no (?!longer|more|less|later|earlier|fewer|wider)": "is not a",
    r"of (its|their|our) own": "its own X, separate",
    r"(?<=; )type": "call, pass, set, use",
}
PATTERNS = [
    (re.compile(rf"\b({words})\b", re.IGNORECASE), plain) for words, plain in SUGGESTIONS.items()
]
WORDS_OF_NAMES = {"anew", "behind", "beside", "hears", "lie", "lies", "stands", "told", "whoever"}
VAGUE = {"found", "given", "here", "how", "kept", "known", "own", "place", "room", "there", "what"}
VAGUE |= {"where", "whole"}
HEADLINES = r"(How|What|When|Where|Whether|Which|Who|Why)\b"


def files() -> list[str]:
    """Return every checked file by its path from the root, each once."""
    patterns = [*(f"{folder}/**/*.py" for folder in FOLDERS), *DOCUMENTS, *KERNELS]
    every = {path.resolve() for pattern in patterns for path in ROOT.glob(pattern)}
    names = {path.relative_to(ROOT).as_posix() for path in every - {Path(__file__).resolve()}}
    return sorted(names)


def texts(name: str) -> Iterator[tuple[int, str]]:
    """Yield the comments and strings of a program, or the prose of a document, with their lines.

    Of a kernel its comments.
    """
    text = (ROOT / name).read_text()
    if name.endswith(".md"):
        yield 1, re.sub(r"(?ms)^```.*?^```", lambda code: "\n" * code[0].count("\n"), text)
        return
    if not name.endswith(".py"):
        yield 1, re.sub(r"(?m)^((?!//).)*", "", text)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def programs(*less: str) -> list[str]:
    """Return the programs, but for those that begin with ``less``."""
    return [name for name in files() if name.endswith(".py") and not name.startswith(less)]


def test_plain_words() -> None:
    wrong = [
        f"{name}:{line + text.count(chr(10), 0, match.start())}: {match[0]!r}; write: {suggestion}"
        for name in files()
        for line, text in texts(name)
        for words, suggestion in PATTERNS
        for match in words.finditer(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_plain_names() -> None:
    for name in programs():
        tokens = tokenize.generate_tokens(io.StringIO((ROOT / name).read_text()).readline)
        names = {token.string for token in tokens if token.type == tokenize.NAME}
        plain = {word for word in names if WORDS_OF_NAMES & set(word.lower().split("_"))}
        assert not plain, name


def test_local_variables_say_what_they_hold() -> None:
    for name in programs():
        nodes = ast.walk(ast.parse((ROOT / name).read_text()))
        functions = [x for x in nodes if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
        inner = [x for function in functions for x in ast.walk(function)]
        names = {x.id for x in inner if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
        assert not names & VAGUE, name


def test_headlines_are_imperatives_or_noun_phrases() -> None:
    """Of modules, classes and functions; a test may have a whole sentence."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    for name in programs("tests/test_"):
        tree = ast.walk(ast.parse((ROOT / name).read_text()))
        texts_of = [ast.get_docstring(node) or "" for node in tree if isinstance(node, kinds)]
        wrong = [text.splitlines()[0] for text in texts_of if re.match(HEADLINES, text)]
        assert not wrong, name
