"""Create the virtual environment that `make` needs; uses the standard library only.

Usage: python3 -I tools/bootstrap_env.py .venv
"""

import ctypes
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("test", "tools", "models", "dev")
GPU_EXTRA = "models_gpu"  # its packages need a torch that was built for CUDA


def main(folder: str) -> None:
    """Create the environment if it does not exist, then install the missing packages."""
    target = Path(folder).absolute()
    python = target / "bin" / "python"
    if not (target / "bin" / "pip").exists():
        venv.create(target, with_pip=True, symlinks=True)
    print(f"installing packages into {folder}; the first time takes a minute")
    _install(python, "setuptools")  # for the build, which runs without isolation
    _install(python, "--no-build-isolation", "--editable", f".[{','.join(EXTRAS)}]")
    extra = _cuda_extra(_driver_cuda(), _torch_cuda(python))
    if extra:
        _install(python, "--no-build-isolation", "--editable", f".[{extra},{GPU_EXTRA}]")


def _install(python: Path, *requirements: str) -> None:
    command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run(
        [*command, "--constraint", "constraints.txt", *requirements], cwd=ROOT, check=True
    )


def _driver_cuda() -> int | None:
    """Return the latest CUDA major version that the driver supports; None without a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version, gpus = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(gpus)) or not gpus.value:
        return None
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000


def _torch_cuda(python: Path) -> int | None:
    """Return the CUDA major version that torch was built for; None for a CPU build."""
    show = "import torch; print(torch.version.cuda or '')"
    text = subprocess.run([python, "-c", show], check=True, capture_output=True, text=True).stdout
    return int(text.split(".")[0]) if text.strip() else None


def _cuda_extra(driver: int | None, torch: int | None) -> str | None:
    """Return the extra whose CuPy fits both, or print why the GPUs stay unused."""
    if driver is None:
        return None
    if torch is None or torch > driver:
        built = "for the CPU" if torch is None else f"for CUDA {torch}"
        print(
            f"GPUs stay unused: the driver supports CUDA {driver}, but torch was built {built}. "
            f"Install a torch built for CUDA {driver} into this environment, remove its file "
            f".ready and run make again"
        )
        return None
    return f"cuda{min(torch, 13)}"


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"set-up failed: {' '.join(map(str, error.cmd))}; fix the cause, then run make again"
        )
