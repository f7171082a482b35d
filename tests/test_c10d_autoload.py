"""Programs that do not import commlib, on rings with one environment variable."""

import configparser
import os
from pathlib import Path

import pytest

import commlib_autoload
from commlib import flags
from tests.support.processes import ROOT, run

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
IMPORTED = (
    "import sys, torch\n"
    "print([name for name in sys.modules if name.partition('.')[0] == 'commlib'])\n"
)
PROGRAM = """
from torch.distributed import batch_isend_irecv, init_process_group, new_group
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

texts = []

def reduced(group=None):
    x = torch.full((2,), dist.get_rank(group) + 1.0)
    dist.all_reduce(x, group=group)
    return x.tolist()

def exchanged():
    out, other = torch.empty(1), 1 - dist.get_rank()
    calls = [dist.P2POp(dist.isend, torch.ones(1) + other, other)]
    for work in batch_isend_irecv([*calls, dist.P2POp(dist.irecv, out, other)]):
        work.wait()
    return out.item() == dist.get_rank() + 1

for given in (("gloo",), ("cpu:gloo,cuda:nccl",), ()):
    init_process_group(*given)
    texts.append((reduced(), reduced(new_group([0, 1], backend="gloo")), exchanged()))
    dist.monitored_barrier()
    dist.destroy_process_group()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
texts.append((reduced(mesh["all"].get_group()), model.module.weight.grad.tolist()))
if dist.get_rank() == 0:
    print(texts)
    print(dist.get_backend(), "commlib" in sys.modules)
dist.destroy_process_group()
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return a PYTHONPATH on which this checkout is an installed package."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    metadata = tmp_path / "commlib_torch-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: commlib-torch\nVersion: 0\n")
    entry = parser["options.entry_points"]["torch.backends"]
    (metadata / "entry_points.txt").write_text(f"[torch.backends]{entry}\n")
    return os.pathsep.join([str(tmp_path), str(ROOT)])


def test_the_groups_of_a_program_are_rings(path: str, tmp_path: Path) -> None:
    """Each form of a backend, under torchrun, on the engine of the unified flag."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    code, out, err = run(
        *(*LAUNCHER, "--nproc-per-node", "2", str(program)),
        fresh=True,  # the entry point is read by `import torch`
        PYTHONPATH=path,
        **{flags.TORCH_BACKEND: "1", flags.UNIFIED: "1"},
    )
    assert (code, out.splitlines()) == (
        0,
        [str([*[([3.0] * 2, [3.0] * 2, True)] * 3, ([3.0] * 2, [[1.5] * 2])]), "commlib True"],
    ), err


@pytest.mark.parametrize("program", ["tests/programs/trainer.py", "examples/transformers_tp.py"])
def test_programs_of_transformers(path: str, program: str) -> None:
    """The Trainer and a tensor-parallel model under torchrun print the digits of stock gloo."""
    outputs = {}
    for value, backend in (("0", "gloo"), ("1", "commlib")):
        code, out, err = run(
            *(*LAUNCHER, "--nproc-per-node", "2", str(ROOT / program)),
            fresh=True,
            PYTHONPATH=path,
            CUDA_VISIBLE_DEVICES="",
            **{flags.TORCH_BACKEND: value, flags.UNIFIED: "1"},
        )
        assert code == 0, err
        assert f"backend {backend}" in err, err
        outputs[backend] = [line for line in out.splitlines() if not line.startswith("{")]
    assert outputs["gloo"]
    assert outputs["commlib"] == outputs["gloo"]


def test_a_package_that_can_not_be_imported(path: str, tmp_path: Path) -> None:
    """Torch is as it was without the flag; with it, no program runs on torch's own groups."""
    broken, program = tmp_path / "commlib", tmp_path / "program.py"
    broken.mkdir()
    (broken / "__init__.py").write_text("import no_such_module\n")
    program.write_text(IMPORTED)
    assert run(str(program), fresh=True, PYTHONPATH=path) == (0, "[]\n", "")
    code, out, err = run(str(program), fresh=True, PYTHONPATH=path, **{flags.TORCH_BACKEND: "true"})
    assert (code, out) == (1, "")
    assert "No module named 'no_such_module'" in err
    assert "Failed to load the backend extension: commlib" in err


@pytest.mark.parametrize("text", ["", " ", "0"])
def test_an_empty_value_is_as_unset(path: str, text: str) -> None:
    env = {flags.TORCH_BACKEND: text}
    assert run("-c", IMPORTED, fresh=True, PYTHONPATH=path, **env) == (0, "[]\n", "")


def test_a_wrong_value_is_one_line(path: str) -> None:
    for name, text in ((flags.TORCH_BACKEND, "maybe"), (flags.TIMEOUT, "soon")):
        env = {flags.TORCH_BACKEND: "1", name: text}
        code, out, err = run("-c", "import torch", fresh=True, PYTHONPATH=path, **env)
        assert (code, out) == (1, "")
        assert err.startswith(f"import torch: {name}='{text}' is not a "), err
        assert err.count("\n") == 1, err


def test_commlib_is_imported_before_torch(path: str) -> None:
    """The entry point runs in the middle of the import of commlib then."""
    show = "import commlib, torch\nprint(torch.distributed.new_group.__code__.co_filename)"
    code, out, err = run("-c", show, fresh=True, PYTHONPATH=path, **{flags.TORCH_BACKEND: "1"})
    assert (code, err) == (0, "")
    assert Path(out.strip()).name == "torch_distributed.py"


def test_one_name_of_the_flag() -> None:
    assert commlib_autoload.FLAG == flags.TORCH_BACKEND
