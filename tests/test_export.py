"""Exported programs: saved files, loaded by new processes, give eager's bits or say why not."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import commlib
from commlib import export, graph, ops
from commlib.errors import ArgumentError, RingError
from tests.programs.export_models import (
    COLUMNS,
    REVERSED,
    EveryReduction,
    OneRing,
    Writing,
    exported,
)
from tests.support.checks import assert_bits_equal, assert_equal, raises, sample
from tests.support.launchers import on_gpus
from tests.support.operator import calls
from tests.support.processes import ROOT, run
from tests.support.ranks import NewRanks, Ranks
from tests.support.runs_on import runs_on

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
CALLS = 20  # of EveryReduction on each of its two rings, half of them with unused results
Model = Callable[[torch.Tensor], Any]


def saved(factory: pytest.TempPathFactory, worker_id: str, device: str) -> Path:
    """Return the directory of the programs, which one of the workers has saved."""
    base = factory.getbasetemp()
    directory = (base if worker_id == "master" else base.parent) / f"exported_{device}"
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            more = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
            on_cpus = *LAUNCHER, "--nproc-per-node", "2"
            directory.mkdir()
            code, out, err = run(
                *(on_cpus if device == "cpu" else on_gpus()),
                *("-m", "tests.programs.export_models", str(directory)),
                seconds=500,
                FLAGS_dynamic_static_unified_comm="1",
                TORCHINDUCTOR_CACHE_DIR=str(directory / "compiled"),
                **more,
            )
            assert code == 0, out + err
    return directory


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The programs, for the CPU."""
    return saved(tmp_path_factory, worker_id, "cpu")


STOCK = """
import sys, torch
program = torch.export.export(torch.nn.ReLU().cuda(), (torch.ones(4, device="cuda"),))
path = torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
print("saved", flush=True)
print(torch._inductor.aoti_load_package(path)(torch.ones(4, device="cuda")).tolist())
"""


@pytest.fixture(scope="session")
def gpu_files(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The programs, for GPUs."""
    return saved(tmp_path_factory, worker_id, "cuda")


def loads_packages() -> bool:
    """Return True if torch can load a package that it has made for a GPU of this machine.

    One worker of the run tries it; on some machines the process ends with a signal.
    """
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])  # of this run
    answer = folder / "loads_packages"
    with FileLock(f"{answer}.lock"):
        if not answer.exists():
            code, out, err = run("-c", STOCK, str(folder / "stock.pt2"), seconds=200)
            ended = code < 0 and out == "saved\n"
            assert ended or out == "saved\n[1.0, 1.0, 1.0, 1.0]\n", err
            answer.write_text("no" if ended else "yes")
    return answer.read_text() == "yes"


def package(file: Path) -> Model:
    model: Model = export.aoti_load_package(
        file.with_name("every_package.pt2"), run_single_threaded=True
    )
    return model


def program(file: Path) -> Model:
    return export.load(file).module()


def plain_program(file: Path) -> Model:
    return torch.export.load(file).module()


def plain_package(file: Path) -> Model:
    model: Model = torch._inductor.aoti_load_package(file.with_name("every_package.pt2"))
    return model


def inputs(ring: Any, rows: int) -> torch.Tensor:
    return sample(ring.rank, (rows, COLUMNS), torch.float32, seed=rows).to(ring.device)


def close_all(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    assert_equal(list(found), list(wanted), what)
    for name, want in wanted.items():
        assert_bits_equal(found[name], want, f"{name}, {what}")


@torch.no_grad()
def loaded(ring: Any, load: Callable[[Path], Model], files: Path) -> None:
    """Loaded and eager code on either rank: a call dropped or moved would not match."""
    reverse = commlib.new_ring(REVERSED, [1, 0])
    before = calls(ring), calls(reverse)
    model, eager = load(files / "every.pt2"), EveryReduction().to(ring.device)
    assert_equal((calls(ring), calls(reverse)), before, "collectives after loading")
    for rows in (6, 10):
        x = inputs(ring, rows)
        want = eager(x)
        for ways in ((model, eager), (eager, model), (model, model)):
            before = calls(ring), calls(reverse)
            close_all(ways[ring.rank](x), want, f"{rows} rows")
            counts = calls(ring) - before[0], calls(reverse) - before[1]
            assert_equal(counts, (CALLS, CALLS), "collectives of one call")


@pytest.mark.parametrize("load", [package, program, plain_package, plain_program])
def test_new_processes_get_eager_results(
    new_ranks: NewRanks, files: Path, load: Callable[[Path], Model]
) -> None:
    with new_ranks(2) as ranks:
        ranks(loaded, load, files, deadline=300)


@torch.no_grad()
def captured(ring: Any, load: Callable[[Path], Model], files: Path) -> None:
    """Replays, alone and between other operators, give eager's bits."""
    commlib.new_ring(REVERSED, [1, 0])
    model, eager = load(files / "every.pt2"), EveryReduction().to(ring.device)
    alone = graph.capture(model)
    between = graph.capture(lambda x: {name: y + 1 for name, y in model(x * 2).items()})
    for turn in range(4):
        x = inputs(ring, 6) + turn
        close_all(alone(x), eager(x), f"call {turn}")
        wanted = {name: y + 1 for name, y in eager(x * 2).items()}
        close_all(between(x), wanted, f"call {turn} between operators")
    assert_equal([row["replays"] for row in graph.report()], [3, 3], "replays of each function")


@pytest.mark.parametrize("load", [package, program])
def test_captured_calls(new_ranks: NewRanks, files: Path, load: Callable[[Path], Model]) -> None:
    with new_ranks(2) as ranks:
        ranks(captured, load, files, deadline=300)


if torch.cuda.device_count() and loads_packages():

    @pytest.mark.parametrize("call", [loaded, captured])
    def test_on_gpus(new_gpu_ranks: NewRanks, gpu_files: Path, call: Callable[..., None]) -> None:
        with new_gpu_ranks(2) as ranks:
            ranks(call, package, gpu_files, deadline=300)


@runs_on("cpu_ranks")
def test_programs_that_write(ring: Any, tmp_path: Path) -> None:
    """AOTInductor would drop the writes; a saved program keeps them."""
    path = tmp_path / f"{ring.rank}.pt2"
    program = exported(Writing(), ring.device)
    with raises(ArgumentError, "['calls', 'x']", "commlib.export.save"):
        export.aoti_compile_and_package(program, package_path=path)
    export.save(program, path)
    model, x = export.load(path).module(), inputs(ring, 6)
    want = Writing().to(ring.device)(x.clone())
    assert_bits_equal(model(x.clone()), want, "first call")
    assert_bits_equal(model(x.clone()), want + 1, "second call")


class Branching(torch.nn.Module):
    """A sum in one branch, a maximum in the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.cond(
            x.sum() > 0,
            lambda x: ops.all_reduce(x, op="sum"),
            lambda x: ops.all_reduce(x, op="max"),
            (x,),
        )
        return output


class InContext(torch.nn.Module):
    """A sum inside a context, which torch exports as a graph inside of the graph."""

    def __init__(self, context: Callable[[], Any]) -> None:
        super().__init__()
        self._context = context
        self.weight = torch.nn.Parameter(torch.ones(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        with self._context():
            z: torch.Tensor = ops.all_reduce(y)
        return y + z


@pytest.mark.parametrize("context", [torch.no_grad, partial(torch.autocast, "cpu")])
def test_contexts_are_no_branches(context: Callable[[], Any], unified_ranks: Ranks) -> None:
    unified_ranks(rings_of_branches, context)


def rings_of_branches(ring: Any, context: Callable[[], Any]) -> None:
    program = torch.export.export(InContext(context), (torch.ones(3, 3),))
    assert_equal([*export.rings.in_branches(program)], [], "collectives in branches")
    assert_equal(export.rings.describe(program), f'{{"0": {[*ring.ranks]}}}', "all collectives")


@runs_on("cpu_ranks")
def test_programs_with_branches(ring: Any, tmp_path: Path) -> None:
    """AOTInductor can't lower a collective in a branch; a saved program has it."""
    path = tmp_path / f"{ring.rank}.pt2"
    with torch.no_grad():
        program = torch.export.export(Branching(), (torch.ones(3),))
    with raises(ArgumentError, "a collective of ring 0 in a branch", "commlib.export.save"):
        export.aoti_compile_and_package(program, package_path=path)
    export.save(program, path)
    model = export.load(path).module()
    assert_bits_equal(model(torch.ones(3)), torch.full((3,), 2.0), "the sum")
    assert_bits_equal(model(-torch.ones(3)), -torch.ones(3), "the maximum")


@runs_on("cpu_ranks")
def test_other_modes(ring: Any, files: Path) -> None:
    """Other modes and transforms of torch can't look into a package."""
    commlib.new_ring(REVERSED, [1, 0])
    model = package(files / "every.pt2")
    before = calls(ring)
    with torch._subclasses.FakeTensorMode() as mode, raises(ArgumentError, "can't be traced"):
        model(mode.from_tensor(inputs(ring, 6)))
    with raises(ArgumentError, "run_package under torch.vmap"):
        torch.vmap(model)(torch.stack([inputs(ring, 6)] * 2))
    assert_equal(calls(ring), before, "collectives after refused calls")


def elsewhere(ring: Any, load: Callable[[Path], Model], files: Path) -> None:
    """Another layout than [0, 1] and [1, 0] is an error, before anything is launched."""
    name = "every_package.pt2" if load is package else "every.pt2"
    before = calls(ring)
    if ring.size == 2:
        with raises(RingError, f"ring {REVERSED}", "does not exist"):
            load(files / "every.pt2")
        commlib.new_ring(REVERSED, [0, 1])
        with raises(RingError, f"ring {REVERSED}", name, "expected [1, 0]"):
            load(files / "every.pt2")
    else:
        with raises(RingError, "ring 0", name, "[0, 1, 2]", "expected [0, 1]"):
            load(files / "every.pt2")
    assert_equal(calls(ring), before, "collectives after refused loads")


@pytest.mark.parametrize("load", [package, program])
@pytest.mark.parametrize("size", [2, 3])
def test_another_layout(
    new_ranks: NewRanks, files: Path, size: int, load: Callable[[Path], Model]
) -> None:
    with new_ranks(size) as ranks:
        ranks(elsewhere, load, files)


@torch.no_grad()
def replicated(ring: Any, files: Path) -> None:
    """The ranks of a ring may be replaced by as many others, if the caller names them."""
    file = files / "one_ring.pt2"
    if commlib.new_ring(REVERSED, [1, 2]) is None:
        return
    with raises(RingError, "expected [1, 0]"):
        export.load(file)
    for wrong in ({REVERSED: [0, 1, 2]}, {5: [1, 2]}):
        with raises(ArgumentError, "one_ring.pt2", f"ranks={wrong}", f"{{{REVERSED}: [1, 0]}}"):
            export.load(file, ranks=wrong)
    with raises(RingError, "expected [0, 2]"):
        export.load(file, ranks={REVERSED: [0, 2]})
    x = inputs(ring, 6)
    assert_bits_equal(
        export.load(file, ranks={REVERSED: [1, 2]}).module()(x), OneRing()(x), "on other ranks"
    )


def test_other_ranks_in_place_of_those_of_the_export(new_ranks: NewRanks, files: Path) -> None:
    with new_ranks(3) as ranks:
        ranks(replicated, files)


def recording(ring: Any, files: Path) -> None:
    """The record is separate from the program and from further files."""
    reverse = commlib.new_ring(REVERSED, [1, 0])
    with raises(ArgumentError, "unrecorded.pt2", "commlib.export"):
        export.load(files / "unrecorded.pt2")
    extras: dict[str, Any] = {}
    one = export.load(files / "every.pt2", extra_files=extras)
    assert_equal(extras, {"note": "kept"}, "other files of the archive")
    assert reverse is not None
    reverse.close()
    commlib.close_ring(REVERSED)
    with raises(RingError, f"ring {REVERSED}", "was closed"):
        export.save(one, files / f"not_saved_{ring.rank}.pt2")
    assert_equal((files / f"not_saved_{ring.rank}.pt2").exists(), False, "a file")


def test_the_record(new_ranks: NewRanks, files: Path) -> None:
    with new_ranks(2) as ranks:
        ranks(recording, files)


@pytest.mark.parametrize(
    ("load", "file", "said"),
    [
        ("torch.export.load", "every.pt2", "failed to resolve torch.ops.commlib.all_reduce"),
        (
            "torch._inductor.aoti_load_package",
            "every_package.pt2",
            "Could not find schema for commlib::all_reduce",
        ),
    ],
)
def test_a_process_without_commlib(files: Path, load: str, file: str, said: str) -> None:
    code, _, err = run("-c", f"import torch; {load}({str(files / file)!r})")
    assert code == 1
    assert said in err
    assert said in (ROOT / "docs" / "export.md").read_text()


@runs_on("cpu_ranks")
def test_no_nccl_communicator(ring: Any) -> None:
    """A ring without NCCL says so, also when it is closed."""
    with raises(ArgumentError, "ring 0", "no NCCL communicator", "engine"):
        ring.nccl_comm  # noqa: B018
    other = commlib.new_ring(5, [0, 1])
    assert other is not None
    other.close()
    with raises(RingError, "ring 5", "can't be used"):
        other.nccl_comm  # noqa: B018


@runs_on("gpu_ranks")
def test_the_nccl_communicator(ring: Any) -> None:
    """The address is one that NCCL knows."""
    import ctypes

    from commlib.engines.libnccl import raw

    ring = commlib.new_ring(5, [1, 0])
    with raises(ArgumentError, "ring 5", "ring.connect()"):
        ring.nccl_comm  # noqa: B018
    ring.connect()
    rank = ctypes.c_int(-1)
    assert_equal(
        raw().ncclCommUserRank(ctypes.c_void_p(ring.nccl_comm), ctypes.byref(rank)), 0, "status"
    )
    assert_equal(rank.value, ring.rank, "rank of the communicator")


def test_the_example(tmp_path: Path) -> None:
    """As its first lines say: one start saves, another one loads."""
    for step, seconds in (("save", 400), ("run", 120)):
        code, out, err = run(
            *(*LAUNCHER, "--nproc-per-node", "2", "examples/exported_inference.py"),
            *(step, str(tmp_path)),
            seconds=seconds,
            FLAGS_dynamic_static_unified_comm="1",
            CUDA_VISIBLE_DEVICES="",
        )
        assert code == 0, out + err
    assert out.splitlines() == ["package: bit for bit the same", "captured: bit for bit the same"]


def test_the_example_without_its_files(tmp_path: Path) -> None:
    code, out, err = run("examples/exported_inference.py", "run", str(tmp_path))
    said = f"{tmp_path}/rank0of1.pt2: no such file; call it with `save` first\n"
    assert (code, out, err) == (2, "", said)
