"""commlib imports from a bare checkout and from both installs, and its import touches nothing."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("setup.cfg", "pyproject.toml", "README.md", "commlib", "ops", "compat", "tools")
IMPORTS = "import commlib, commlib.ops, commlib.compat, commlib.tools\n"
DEADLINE_S = 180


def run(*command: object, cwd: Path) -> str:
    """Run ``command`` outside this checkout's influence; return what it printed."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    elsewhere = os.pathsep.join(p for p in paths if p and Path(p).resolve() != ROOT)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": elsewhere},
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
    """Give a copy of the sources with their links, as git would make it."""
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
    """A virtual environment that borrows every package of this interpreter, except commlib."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.bin = folder / "bin"
        self.site = next(folder.glob("lib/python*/site-packages"))
        lent = [path for path in sys.path if path and Path(path).resolve() != ROOT]
        (self.site / "lent.pth").write_text("\n".join(lent))

    def install(self, *what: object) -> None:
        """Run pip on this environment; it downloads nothing."""
        offline = ("--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed")
        pip = (sys.executable, "-m", "pip", "--python", self.bin / "python")
        run(*pip, "install", *offline, *what, cwd=self.site)

    def origin(self, cwd: Path) -> Path:
        """Return the folder that ``import commlib`` finds here."""
        show = f"{IMPORTS}print(commlib.__file__)"
        return Path(run(self.bin / "python", "-c", show, cwd=cwd).strip()).parent

    def names(self) -> set[str]:
        """Return what the install left in site-packages, without its own records."""
        return {p.name for p in self.site.iterdir() if p.suffix not in (".dist-info", ".pth")}


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """Give a virtual environment without commlib."""
    return Environment(tmp_path / "env")


def test_bare_checkout_imports(checkout: Path) -> None:
    """Every module, but for GPU kernels where torch has not brought Triton."""
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
    assert environment.names() == {"commlib"}
    assert not [path for path in package.rglob("*") if path.is_symlink()]
    assert (package / "ops" / "collectives" / "_all_gather.py").is_file()
    assert (package / "py.typed").is_file()
    assert "doctor" in run(environment.bin / "commlib", "--help", cwd=tmp_path)


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
