"""The build of the house: imports point down, two rooms read the environment, links are links."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("ops", "compat", "tools")
LAYERS = (  # lowest first: a module imports from lines above its own, or from its own room
    "commlib.errors",
    "commlib.log",
    "commlib.keepalive",
    "commlib.flags",
    "commlib.engines.reductions",
    "commlib.worker_threads",
    "commlib.deadlines",
    "commlib.waits",
    "commlib.rendezvous.connection",
    "commlib.rendezvous.store",
    "commlib.rendezvous.tcp_store",
    "commlib.rendezvous.shared_memory",
    "commlib.rendezvous.host_exchange",
    "commlib.core.call_log",
    "commlib.core.call_reports",
    "commlib.core.failures",
    "commlib.rendezvous.wait_table",
    "commlib.rendezvous.verdicts",
    "commlib.rendezvous.meeting",
    "commlib.rendezvous.roll_call",
    "commlib.streams",
    "commlib.core.tensors",
    "commlib.core.work",
    "commlib.p2p.routes",
    "commlib.core.ring",
    "commlib.p2p",
    "commlib.core.validation",
    "commlib.core.compiler",
    "commlib.core.observers",
    "commlib.core.mismatch",
    "commlib.core.modes",
    "commlib.core.dispatch",
    "commlib.core.group",
    "commlib.engines.base",
    "commlib.core.context",
    "commlib.engines.c10d",
    "commlib.engines.gloo",
    "commlib.engines.legacy",
    "commlib.engines.libnccl",
    "commlib.engines.graph_holds",
    "commlib.engines.nccl_connection",
    "commlib.engines.nccl",
    "commlib.rendezvous.launchers",
    "commlib.rendezvous.world",
    "commlib.rendezvous.program_store",
    "commlib.rendezvous.environment",
    "commlib.core.devices",
    "commlib.core.membership",
    "commlib.core.closing",
    "commlib.core.process_exit",
    "commlib.core.creation",
    "commlib.core.manager",
    "commlib.graph",
    "commlib.ops",
    "commlib",
    "commlib.compat",
    "commlib.tools",
)
READS_ENVIRONMENT = {"commlib.flags", "commlib.rendezvous.environment"}


def _files() -> dict[str, Path]:
    """Return every source file of the package by the name it is imported with."""
    files = {}
    for path in (p for room in ("commlib", *LINKS) for p in (ROOT / room).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "commlib" and len(parts) > 1 and parts[1] in LINKS:
            continue  # the same file through its link
        parts = parts if parts[0] == "commlib" else ("commlib", *parts)
        files[".".join(part for part in parts if part != "__init__")] = path
    return files


FILES = _files()


def layer(module: str) -> str:
    """Return the line of LAYERS that ``module`` belongs to."""
    if module in LAYERS:
        return module
    above = module.rpartition(".")[0]
    if above in ("", "commlib"):
        pytest.fail(f"{module} has no line in LAYERS; give it one above all that import it")
    return layer(above)


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Walk everything but the branches that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from run_time_nodes(child)


def imports(path: Path) -> set[str]:
    """Return the modules of commlib that ``path`` imports anything from."""
    found: set[str] = set()
    for node in run_time_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: {ast.unparse(node)}; type `from commlib.... import`"
            base = node.module or ""
            deep = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else base for name in deep}
    return {name for name in found if name.split(".")[0] == "commlib"}


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module: str) -> None:
    here = LAYERS.index(layer(module))
    up = {name for name in imports(FILES[module]) if LAYERS.index(layer(name)) > here}
    assert not up, f"{module} imports {sorted(up)}, which sit above it"


def test_no_import_goes_round() -> None:
    TopologicalSorter({module: imports(path) for module, path in FILES.items()}).prepare()


@pytest.mark.parametrize("module", [m for m in FILES if not m.startswith("commlib.tools")])
def test_only_two_rooms_read_the_environment(module: str) -> None:
    """Tools start programs and hand the environment on; all else asks flags or the bootstrap."""
    text = FILES[module].read_text()
    reads = "os.environ" in text or "getenv" in text or "import environ" in text
    assert module in READS_ENVIRONMENT or not reads


def test_every_room_is_on_the_map() -> None:
    rooms = {path.name for path in (ROOT / "commlib").iterdir() if path.is_dir()} - {"__pycache__"}
    text = (ROOT / "README.md").read_text().split("## The map")[1]
    assert not [name for name in rooms if f"{name}/`" not in text]


@pytest.mark.parametrize("name", LINKS)
def test_links(name: str) -> None:
    """A copy in place of the link would go stale without a word."""
    assert (ROOT / "commlib" / name).readlink() == Path("..", name)
