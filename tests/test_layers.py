"""The build of the house: imports point down, files are short, links are links."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("ops", "compat", "tools")
LAYERS = (  # lowest first, one line per folder; a module imports from its line and those above
    "ground",  # flags/ and the files of commlib/ itself, but for its two entrances
    "rendezvous",
    "p2p",
    "engines",
    "core",
    "graph",
    "ops",
    "export",
    "compat",
    "commlib",  # the package's __init__
    "tools",
    "__main__",
)
# The same for the folders of graph/; its files and other folders are above them.
GRAPH = (
    "python",
    "operators",
    "watching",
    "backends",
    "calls",
    "surroundings",
    "recording",
    "replaying",
    "",
)
READS_ENVIRONMENT = {"commlib.flags", "commlib.rendezvous.environment"}


def _files() -> dict[str, Path]:
    """Return every source file of the package by the name it is imported with."""
    files = {}
    for path in (p for folder in ("commlib", *LINKS) for p in (ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "commlib" and len(parts) > 1 and parts[1] in LINKS:
            continue  # the same file through its link
        parts = parts if parts[0] == "commlib" else ("commlib", *parts)
        files[".".join(part for part in parts if part != "__init__")] = path
    return files


FILES = _files()


def layer(module: str) -> tuple[int, int]:
    """Return the place of ``module``: the line of its folder, and its folder's place in graph/."""
    folder, inner = [*module.split(".")[1:], "", ""][:2]
    if not folder or folder == "__main__":
        return LAYERS.index(folder or "commlib"), 0
    if folder == "flags" or FILES.get(f"commlib.{folder}", ROOT).parent == ROOT / "commlib":
        folder = "ground"
    assert folder in LAYERS, f"{module} is in a folder without a line in LAYERS"
    inside = folder == "graph"
    return LAYERS.index(folder), GRAPH.index(inner if inner in GRAPH else "") if inside else 0


def imports(path: Path) -> set[str]:
    """Return the modules of commlib that ``path`` imports from, also for types or by name."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: {ast.unparse(node)}; write `from commlib.... import`"
            base = node.module or ""
            deep = {f"{base}.{alias.name}" for alias in node.names}
            modules |= {name if name in FILES else base for name in deep}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0]
            modules |= {name.value} if isinstance(name, ast.Constant) else set()
    return {name for name in modules if name.split(".")[0] == "commlib"}


def test_imports_point_down() -> None:
    for module, path in FILES.items():
        level = layer(module)
        up = {name for name in imports(path) if layer(name) > level}
        assert not up, f"{module} imports {sorted(up)}, which sit above it"


def test_no_import_goes_round() -> None:
    TopologicalSorter({module: imports(path) for module, path in FILES.items()}).prepare()


def test_only_two_rooms_read_the_environment() -> None:
    """Tools start programs and hand the environment on; all else asks flags or the bootstrap."""
    for module, path in FILES.items():
        text = path.read_text()
        reads = "os.environ" in text or "getenv" in text or "from os import" in text
        assert module in READS_ENVIRONMENT or module.startswith("commlib.tools") or not reads


def test_files_and_functions_are_short() -> None:
    """A docstring and a signature do not count: those of an operator list every option."""
    tests = ROOT / "tests"
    for path in (*FILES.values(), *tests.rglob("*.py")):
        text = path.read_text()
        assert text.count("\n") <= (500 if path.is_relative_to(tests) else 300), path
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                assert lines_of(function) <= 40, f"{path}: {function.name}"


def lines_of(function: ast.FunctionDef) -> int:
    """Return the lines of the statements of a function."""
    first = function.body[0]
    if ast.get_docstring(function) is not None and len(function.body) > 1:
        first = function.body[1]
    return (function.end_lineno or 0) - first.lineno + 1


def test_every_room_is_on_the_map() -> None:
    rooms = {path.name for path in (ROOT / "commlib").iterdir() if path.is_dir()} - {"__pycache__"}
    text = (ROOT / "docs" / "architecture.md").read_text().split("## Rooms")[1]
    assert not [name for name in rooms if f"{name}/`" not in text]


@pytest.mark.parametrize("name", LINKS)
def test_links(name: str) -> None:
    """A copy in place of the link would go stale silently."""
    assert (ROOT / "commlib" / name).readlink() == Path("..", name)
