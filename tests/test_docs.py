"""The documents: links resolve, their Python runs on two ranks, quotes are those of the code."""

import ast
import re
from pathlib import Path

import pytest

from commlib import errors, flags
from tests.support.processes import ROOT, run

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PROGRAMS = [page for page in PAGES if "```python" in page.read_text()]
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
README_LINES = 120
TO_BE_WRITTEN = {"ops/collectives/_rotate.py", "tests/test_rotate.py"}  # by the reader of the guide


def page_id(page: Path) -> str:
    """Return the path of a page from the root."""
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """Return the text of a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", prose(page))
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_paths_exist(page: Path) -> None:
    """Paths in code quotes that begin with a folder of the checkout."""
    names = re.findall(r"`((?:commlib|ops|compat|tools|tests|examples|docs)/[\w./]*)`", prose(page))
    missing = {name for name in names if not (ROOT / name).exists()}
    assert not missing - TO_BE_WRITTEN


OWN_TESTS = {  # the files of tests that a page names without one
    "graph_hazards.md": "test_graph_hazards*.py",
    "paddle_differences.md": "test_compat_paddle*.py",
}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_tests_exist(page: Path) -> None:
    named = re.findall(r"`(?:(test_\w+\.py)(?:::)?)?(test_\w+)?[`\[]", page.read_text())
    for file, function in named:
        files = list((ROOT / "tests").glob(file or OWN_TESTS.get(page.name, "test_*.py")))
        assert files, file
        texts = [tests.read_text() for tests in files]
        defined = any(f"def {function}(" in text for text in texts)
        assert defined or not function, f"{file}::{function}"


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES
    assert "CUDA graph" in text
    assert "push kernel" in text


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_index_name_of_another_project_is_not_installed(page: Path) -> None:
    assert "pip install commlib" not in page.read_text()


@pytest.mark.parametrize("page", PROGRAMS, ids=page_id)
def test_python_blocks_run_on_two_ranks(page: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    program = tmp_path / "program.py"
    program.write_text("\n".join(blocks))
    arguments = (*LAUNCHER, "--nproc-per-node", "2", str(program))
    code, out, err = run(
        *arguments,
        CUDA_VISIBLE_DEVICES="",
        FLAGS_comm_timeout_s="60",
        FLAGS_dynamic_static_unified_comm="1",
    )
    assert code == 0, out + err


def test_every_flag_is_documented() -> None:
    lines = (DOCS / "flags.md").read_text().splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in lines if "| `FLAGS" in line]
    documented = {row[1]: row[3] for row in rows}
    assert documented == {row["name"]: default_text(row["default"]) for row in flags.rows()}


def default_text(value: object) -> str:
    """Return a default as the table of flags shows it."""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_flags_exist(page: Path) -> None:
    of_others = {"FLAGS_comm_", "FLAGS_selected_gpus"}
    named = set(re.findall(r"FLAGS_\w+", page.read_text())) - of_others
    assert not named - {row["name"] for row in flags.rows()}


def test_the_tree_of_errors() -> None:
    lines = (DOCS / "errors.md").read_text().split("```")[1].split("\n")[1:-1]
    drawn, above = [], {-1: "RuntimeError"}
    for line in lines:
        depth = len(line) - len(line.lstrip("│├└─ "))
        name, _, others = line[depth:].rstrip(")").partition("(")
        above[depth] = name
        bases = [above[max(d for d in above if d < depth)]] if depth else []
        drawn.append((name, [*bases, *filter(None, others.split(", "))]))
    classes = {name: getattr(errors, name) for name in errors.__all__}
    assert drawn == [(n, [base.__name__ for base in c.__bases__]) for n, c in declared(classes)]


def declared(classes: dict[str, type]) -> list[tuple[str, type]]:
    """Return the classes in the order of their definition."""
    tree = ast.parse(Path(errors.__file__ or "").read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return [(name, classes[name]) for name in names if name in classes]


def test_quoted_messages_are_in_the_code() -> None:
    table = (DOCS / "errors.md").read_text().split("## By message")[1].split("Examples:")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    quotes = [quote for cell in cells for quote in re.findall(r"`(.*?)`", cell)]
    texts = "\n".join(literals())
    assert quotes
    assert not [quote for quote in quotes if quote not in texts]


def literals() -> list[str]:
    """Return every string of the library; a value in an f-string is an empty text."""
    folders = [ROOT / name for name in ("commlib", "ops", "compat")]
    files = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    return [
        text(node)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Constant, ast.JoinedStr))
    ]


def text(node: ast.expr) -> str:
    """Return the fixed parts of a string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else ""
