"""The package: it imports from a checkout and from both installs, and its metadata agree."""

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import commlib

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    *("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "commlib_autoload.py"),
    *("commlib", "ops", "compat", "tools"),
)
IMPORTS = "import commlib, commlib.ops, commlib.compat, commlib.tools\n"
DEADLINE_S = 180


def run(*command: object, cwd: Path) -> str:
    """Run ``command`` without this checkout on the path; return what it printed."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = os.pathsep.join(p for p in paths if p and Path(p).resolve() != ROOT)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": others},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the sources with their links, as git would make it."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=skip)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


class Environment:
    """A virtual environment with the packages of this interpreter, except commlib."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.bin = folder / "bin"
        self.site = next(folder.glob("lib/python*/site-packages"))
        paths = [path for path in sys.path if path and Path(path).resolve() != ROOT]
        (self.site / "shared.pth").write_text("\n".join(paths))

    def install(self, *requirements: object) -> None:
        """Run pip for this environment, without a download."""
        offline = ("--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed")
        pip = (sys.executable, "-m", "pip", "--python", self.bin / "python")
        run(*pip, "install", *offline, *requirements, cwd=self.site)

    def origin(self, cwd: Path) -> Path:
        """Return the folder that ``import commlib`` finds."""
        show = f"{IMPORTS}print(commlib.__file__)"
        return Path(run(self.bin / "python", "-c", show, cwd=cwd).strip()).parent

    def names(self) -> set[str]:
        """Return the names in site-packages, without the records of the install."""
        names = {p.name for p in self.site.iterdir() if p.suffix not in (".dist-info", ".pth")}
        return names - {"__pycache__"}


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """Return a virtual environment without commlib."""
    return Environment(tmp_path / "env")


def test_bare_checkout_imports(checkout: Path) -> None:
    """Import every module, except GPU kernels if Triton is not installed."""
    every = (
        "import commlib, importlib, importlib.util, pkgutil\n"
        "kernels = '' if importlib.util.find_spec('triton') else '_kernels'\n"
        "for module in pkgutil.walk_packages(commlib.__path__, 'commlib.'):\n"
        "    if not (kernels and module.name.endswith(kernels)):\n"
        "        importlib.import_module(module.name)\n"
        "print(commlib.__file__)"
    )
    assert run(sys.executable, "-c", every, cwd=checkout).strip() == str(
        checkout / "commlib" / "__init__.py"
    )


def test_install(checkout: Path, environment: Environment, tmp_path: Path) -> None:
    environment.install(checkout)
    package = environment.site / "commlib"

    assert environment.origin(tmp_path) == package
    assert environment.names() == {"commlib", "commlib_autoload.py"}
    assert not [path for path in package.rglob("*") if path.is_symlink()]
    assert (package / "ops" / "collectives" / "_all_gather.py").is_file()
    assert (package / "py.typed").is_file()
    assert "doctor" in run(environment.bin / "commlib", "--help", cwd=tmp_path)
    version = run(environment.bin / "commlib", "--version", cwd=tmp_path)
    assert version == f"commlib {commlib.__version__}\n"
    (metadata,) = environment.site.glob("commlib_torch-*.dist-info/METADATA")
    fields = metadata.read_text().splitlines()
    assert f"Version: {commlib.__version__}" in fields
    assert "License-Expression: Apache-2.0" in fields and "License-File: LICENSE" in fields


def test_editable_install(checkout: Path, environment: Environment, tmp_path: Path) -> None:
    environment.install("--editable", checkout)

    assert environment.origin(tmp_path) == checkout / "commlib"
    assert environment.names() == set()


def test_import_opens_no_socket_and_no_gpu(checkout: Path) -> None:
    show = (
        "import os\n"
        f"{IMPORTS}"
        "import torch\n"
        "def target(fd):\n"
        "    try:\n"
        "        return os.readlink(f'/proc/self/fd/{fd}')\n"
        "    except FileNotFoundError:\n"
        "        return ''\n"
        "print([t for t in map(target, os.listdir('/proc/self/fd')) if 'socket' in t])\n"
        "print(torch.cuda.is_initialized(), torch.distributed.is_initialized())\n"
    )
    assert run(sys.executable, "-c", show, cwd=checkout).splitlines() == ["[]", "False False"]


def setup_cfg() -> configparser.ConfigParser:
    """Return the parsed setup.cfg."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_one_range_of_python_versions() -> None:
    metadata = setup_cfg()
    lowest = metadata["options"]["python_requires"].removeprefix(">=")
    listed = re.findall(r"Python :: (3\.\d+)", metadata["metadata"]["classifiers"])
    target = re.search(r'target-version = "py3(\d+)"', (ROOT / "pyproject.toml").read_text())

    assert listed == sorted(listed, key=lambda version: int(version.split(".")[1]))
    assert listed[0] == lowest
    assert target and f"3.{target[1]}" == lowest


def test_pre_commit_runs_what_make_check_runs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.split("\ncheck: setup\n")[1].split("\n\n")[0]
    checks = [line.strip().removeprefix("$(RUN) ") for line in recipe.splitlines()]

    entries = re.findall(r"entry: (.+)", (ROOT / ".pre-commit-config.yaml").read_text())

    assert checks == [entry.removeprefix(".venv/bin/python ") for entry in entries]


def test_every_dependency_of_the_tools_is_imported() -> None:
    required = setup_cfg()["options.extras_require"]["tools"].split()
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tools").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imported = {a.name.split(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names}
    imported |= {(n.module or "").split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom)}

    assert not set(required) - imported
