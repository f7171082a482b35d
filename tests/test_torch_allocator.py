"""FLAGS_use_cuda_malloc_async_allocator: torch's allocator is chosen before torch is imported."""

import sys

import pytest
import torch

from commlib.errors import FlagError
from commlib.tools.doctor import versions
from commlib.torch_allocator import select_malloc_async
from tests.support.processes import run

FLAG = "FLAGS_use_cuda_malloc_async_allocator"
BACKEND = "backend:cudaMallocAsync"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("", BACKEND),
        ("max_split_size_mb:64", f"{BACKEND},max_split_size_mb:64"),
        (BACKEND, BACKEND),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_settings_of_torch(
    monkeypatch: pytest.MonkeyPatch, name: str, given: str, text: str
) -> None:
    """The allocator is added to the settings that torch reads, whichever variable has them."""
    monkeypatch.delitem(sys.modules, "torch")
    environment = {name: given}
    select_malloc_async(FLAG, environment)
    assert environment == {name: text}


def test_two_settings_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    environment = {"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_CUDA_ALLOC_CONF": ""}
    select_malloc_async(FLAG, environment)
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == BACKEND, "torch reads this one"


def test_another_allocator_in_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    environment = {"PYTORCH_ALLOC_CONF": "backend:native"}
    with pytest.raises(FlagError, match=f"{FLAG}=1 contradicts PYTORCH_ALLOC_CONF='backend:nat"):
        select_malloc_async(FLAG, environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "backend:native"}


def test_commlib_before_torch() -> None:
    program = (
        "import commlib, os, torch\n"
        "from commlib.torch_allocator import current\n"
        "print(os.environ['PYTORCH_CUDA_ALLOC_CONF'], current())"
    )
    code, out, err = run("-c", program, fresh=True, **{FLAG: "1"})
    has_choice = torch.backends.cuda.is_built()
    assert (code, out.split()) == (0, [BACKEND, "cudaMallocAsync" if has_choice else "None"]), err


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("import torch, commlib", id="environment"),
        pytest.param(f"import commlib; commlib.flags.set({FLAG!r}, 1)", id="set"),
    ],
)
def test_torch_before_commlib(program: str) -> None:
    """It is too late; a torch without CUDA has no choice, so that one job script serves laptops."""
    code, _, err = run("-c", program, **({FLAG: "1"} if "torch" in program else {}))
    assert code == int(torch.backends.cuda.is_built()), err
    for words in (f"{FLAG}=1 is too late", "'native'", "import commlib before torch"):
        assert (words in err) == (code == 1)


@pytest.mark.parametrize("command", ["flags", "doctor"])
def test_commands_show_contradictions(command: str) -> None:
    """The command imports commlib too, and would run without the allocator that it was given."""
    settings = {FLAG: "1", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    code, out, err = run("-m", "commlib", command, COLUMNS="400", **settings)
    assert (code != 0) and f"{FLAG}=1 contradicts" in out + err, f"{code}\n{out}\n{err}"


def test_doctor_names_it() -> None:
    name = "native" if torch.backends.cuda.is_built() else "none: CPU build"
    assert ("torch takes GPU memory from", name) in versions()
