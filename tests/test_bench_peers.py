"""Peers of `commlib bench`: their folder, their C interface, and peers that fail."""

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commlib import CommContext
from commlib.tools.bench.command import run_bench
from commlib.tools.bench.peers import expert_ways, folder, sglang, vllm
from commlib.tools.bench.peers.flashinfer_experts import COPIED, FLASHINFER, Tokens
from commlib.tools.bench.peers.watch import Watch, last_peer, launch_without
from commlib.tools.bench.peers.way import Near, Way
from commlib.tools.launch import LaunchError
from tests.support.processes import ROOT, run
from tests.support.runs_on import runs_on

SIZE = 2
COMPILER = shutil.which("cc")
HOW = ("one-shot", "one-shot, early trigger", "two-shot")
NAMES = {
    "libsgl.so": [f"SGLang {n}-shot {way}" for way in ("push", "pull") for n in ("one", "two")],
    "libfi.so": [f"FlashInfer {how}" for how in HOW],
    "libvllm.so": ["vLLM"],
}

# -- the C interface, where the ranks are threads --------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one library per peer, compiled from one source."""
    made = tmp_path_factory.mktemp("peers")
    source = ROOT / "tests" / "support" / "peer_kernels.c"
    for name in (*NAMES, "libmoe.so"):
        command = [str(COMPILER), "-O1", "-shared", "-fPIC", "-pthread", str(source), "-lm"]
        subprocess.run([*command, "-o", str(made / name)], check=True, timeout=60)
    return made


class Threads:
    """What the threads of a test share."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(SIZE, timeout=30)
        self.seen: list[torch.Tensor] = [torch.empty(0)] * SIZE

    def gather(self, rank: int, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor of each thread."""
        self.barrier.wait()
        self.seen[rank] = mine
        self.barrier.wait()
        return list(self.seen)


class HostMemory:
    """Memory of one process, which every thread maps where it is."""

    size, device, processors = SIZE, torch.device("cpu"), 4

    def __init__(self, rank: int, threads: Threads) -> None:
        self.rank, self._threads, self._owned = rank, threads, list[torch.Tensor]()

    def shared(self, nbytes: int) -> tuple[torch.Tensor, list[int]]:
        mine = torch.zeros(nbytes, dtype=torch.uint8)
        self._owned.append(mine)
        return mine, [one.data_ptr() for one in self._threads.gather(self.rank, mine)]

    def stream(self) -> int:
        return 0

    def barrier(self) -> None:
        self._threads.barrier.wait()


def on_threads(body: Callable[[HostMemory, Threads], None]) -> None:
    threads = Threads()
    with ThreadPoolExecutor(SIZE) as pool:
        ended = [pool.submit(body, HostMemory(rank, threads), threads) for rank in range(SIZE)]
    for one in ended:
        one.result()


def calls(way: Way, memory: HostMemory, threads: Threads) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the exact sums of random values, and results, for more calls than buffers."""
    generator = torch.Generator().manual_seed(memory.rank)
    for _ in range(5):
        way.x.copy_(torch.randn(way.x.shape, generator=generator))
        parts = threads.gather(memory.rank, way.x.clone())
        outputs = way.call()
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        exact = sum(part.double().numpy() for part in parts)
        yield np.asarray(exact), [one.double().numpy() for one in outputs]
        threads.barrier.wait()


if COMPILER:

    @pytest.mark.parametrize("name", NAMES)
    def test_each_way_of_a_library_adds_up(
        name: str, built: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sglang, "PLANE", 256)  # below the tensor: the larger plane is needed

        def body(memory: HostMemory, threads: Threads) -> None:
            peer = folder.load(str(built / name), memory, 2**15)
            for shape in ((512,), (16, 96)):
                ways = peer.sums(shape)
                # a flat tensor is one row of FlashInfer, whose two-shot kernel needs more
                flat = [way for way in NAMES[name] if way != "FlashInfer two-shot"]
                assert list(ways) == flat
                for way in ways.values():
                    for exact, (actual,) in calls(way, memory, threads):
                        np.testing.assert_allclose(actual, exact, rtol=2**-7, atol=2**-8)

        on_threads(body)

    def test_the_fused_ways_add_a_residual_and_normalise(built: Path) -> None:
        generator = torch.Generator().manual_seed(7)
        residual = torch.randn(8, 64, generator=generator).bfloat16()
        weight = torch.randn(64, generator=generator).bfloat16()

        def body(memory: HostMemory, threads: Threads) -> None:
            peer = folder.load(str(built / "libfi.so"), memory, 2**15)
            ways = peer.norms(residual, weight, 1e-6)
            assert list(ways) == [f"FlashInfer {mode}, fused" for mode in HOW]
            for way in ways.values():
                for exact, (normal, total) in calls(way, memory, threads):
                    sums = exact + residual.double().numpy()
                    scale = np.sqrt((sums**2).mean(-1, keepdims=True) + 1e-6)
                    expected = sums / scale * weight.double().numpy()
                    np.testing.assert_allclose(total, sums, rtol=2**-6, atol=2**-7)
                    np.testing.assert_allclose(normal, expected, rtol=2**-5, atol=2**-6)

        on_threads(body)

    def test_the_library_of_experts_brings_tokens_there_and_back(built: Path) -> None:
        tokens, width, experts, top_k = 24, 64, 8, 3

        def body(memory: HostMemory, threads: Threads) -> None:
            generator = torch.Generator().manual_seed(memory.rank)
            x = torch.randn(tokens, width, generator=generator).bfloat16()
            ids = torch.rand(tokens, experts, generator=generator).topk(top_k, 1).indices
            ids[0] = torch.arange(top_k)  # all on one rank
            sent = Tokens(x, ids, torch.ones(tokens, top_k), experts)
            peer = folder.load(str(built / "libmoe.so"), memory, sent)
            xs = threads.gather(memory.rank, x)
            owners = [one // (experts // SIZE) for one in threads.gather(memory.rank, ids)]
            expected = [
                part[(owner == memory.rank).any(1)] for part, owner in zip(xs, owners, strict=True)
            ]
            copies = sum((owners[memory.rank] == rank).any(1).int() for rank in range(SIZE))
            near = Near(x.double() * torch.as_tensor(copies)[:, None], x.double().abs() * 2**-7)
            for _ in range(3):
                (entry,) = peer.dispatches().items()
                assert entry[0] == FLASHINFER
                assert expert_ways.check_dispatch(*entry, peer.received, expected)
                assert list(peer.combines()) == [FLASHINFER, COPIED]
                for name, call in peer.combines().items():
                    assert expert_ways.check_combine(name, call, near)
                threads.barrier.wait()

        on_threads(body)

    def test_experts_that_ranks_can_not_share_evenly_are_an_error(built: Path) -> None:
        sent = Tokens(torch.zeros(4, 64).bfloat16(), torch.zeros(4, 2), torch.ones(4, 2), 7)

        with pytest.raises(ValueError, match="7 experts: expected a multiple of the 2 ranks"):
            folder.load(str(built / "libmoe.so"), HostMemory(0, Threads()), sent)

    def test_a_launch_that_fails_names_its_function(built: Path) -> None:
        def body(memory: HostMemory, threads: Threads) -> None:
            peer = folder.load(str(built / "libvllm.so"), memory, 2**12)
            way = peer.sums((64,))["vLLM"]
            memory.stream = lambda: 1  # type: ignore[method-assign]
            with pytest.raises(RuntimeError, match="vllm_allreduce returned -1; expected 0"):
                way.call()

        on_threads(body)

    def test_a_library_without_the_function_is_named(built: Path, tmp_path: Path) -> None:
        empty = tmp_path / "libsgl.so"
        command = [str(COMPILER), "-shared", "-x", "c", "/dev/null", "-o", str(empty)]
        subprocess.run(command, check=True, timeout=60)
        with pytest.raises(AttributeError, match=r"libsgl\.so: undefined symbol: sgl_push"):
            folder.load(str(empty), HostMemory(0, Threads()), 2**12)


@pytest.mark.parametrize(
    ("nbytes", "ranks", "stages"),
    [(2**26, 2, 1), (2**18, 4, 1), (2**19, 4, 2), (2**17, 8, 1), (2**18, 8, 2)],
)
def test_stages_of_vllm(nbytes: int, ranks: int, stages: int) -> None:
    assert vllm._stages(nbytes, ranks) == stages


# -- the folder ------------------------------------------------------------------------------------


def test_a_folder_without_libraries_is_an_error_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "libother.so").write_bytes(b"")
    sums, rows = "libsgl.so, libfi.so, libvllm.so", "libmoe.so"
    for names, files in {("allreduce",): sums, ("dispatch",): rows, (): f"{sums}, {rows}"}.items():
        assert run_bench(names, str(tmp_path / "out"), peers=str(tmp_path / "absent")) == 2
        assert f"there is no such folder; pass one with {files} (" in capsys.readouterr().err
        assert run_bench(names, str(tmp_path / "out"), peers=str(tmp_path)) == 2
        said = capsys.readouterr().err
        assert f"none of {files} is in it" in said
        assert "docs/benchmark_peers.md says, or remove --peers" in said
    assert not (tmp_path / "out").exists()


def test_other_benchmarks_have_no_peers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "libfi.so").write_bytes(b"")

    assert run_bench(("gloo",), None, peers=str(tmp_path)) == 2
    assert "gloo has no option 'peers'; remove --peers" in capsys.readouterr().err


def test_contents_name_no_folder(tmp_path: Path) -> None:
    (tmp_path / "libfi.so").write_bytes(b"abc")

    assert folder.refusal(str(tmp_path)) is None
    said = folder.contents(str(tmp_path), "allreduce")

    assert said == (
        "libraries of peers: libfi.so (sha256 ba7816bf8f01); absent: libsgl.so, libvllm.so"
    )
    assert list(folder.libraries(str(tmp_path), "allreduce")) == ["libfi.so"]
    said = folder.contents(str(tmp_path), "dispatch")
    assert said == "libraries of peers: none; absent: libmoe.so"


def test_a_library_of_another_benchmark_is_not_enough(tmp_path: Path) -> None:
    (tmp_path / "libfi.so").write_bytes(b"")

    assert "none of libmoe.so is in it" in (folder.refusal(str(tmp_path), ["dispatch"]) or "")
    assert folder.refusal(str(tmp_path), ["dispatch", "allreduce"]) is None
    assert folder.refusal(str(tmp_path), ["gloo"]) is None  # which has no option --peers


# -- peers that fail -------------------------------------------------------------------------------


def _raise(text: str) -> bool:
    raise RuntimeError(text)


@runs_on("cpu_ranks")
def test_a_peer_that_fails_on_one_rank_is_left_out_on_all(
    ring: CommContext, tmp_path: Path
) -> None:
    watch = Watch(ring, str(tmp_path), [], lambda: None)

    broken = watch.attempt("broken", "graph, 1 KiB", lambda: ring.rank == 0 or _raise("no\nline"))
    right = watch.attempt("right", "graph, 1 KiB", lambda: 5)

    assert (broken, right) == (None, 5)
    assert watch.failed == {"broken": {"graph, 1 KiB": "rank 1: RuntimeError: no"}}
    assert (tmp_path / str(ring.rank)).read_text() == ""


HANGS = """
import sys, time
import commlib
from commlib.tools.bench.peers.watch import Watch
ring = commlib.init("gloo")
watch = Watch(ring, sys.argv[1], [], lambda: None, seconds=1)
assert watch.attempt("quick", "set-up", lambda: 3) == 3
{step}
"""


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ('watch.attempt("bad", "x", lambda: time.sleep(60))', "took too long and was ended"),
        ('watch.meter("bad", lambda: 1 / 0)()', "rank 0: ZeroDivisionError: division by zero"),
        ('import os; watch.meter("bad", lambda: os.abort())()', "ended its rank:"),
    ],
    ids=["hang", "error", "crash"],
)
def test_the_journal_names_the_peer_that_ended_a_rank(
    step: str, reason: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(HANGS.format(step=step))
    journal = tmp_path / "journal"
    journal.mkdir()

    code, _, err = run(str(program), str(journal), seconds=60, fresh=True)

    assert code != 0
    peer, why = last_peer(journal, err)
    assert peer == "bad" and why.startswith(reason)


def test_ranks_start_again_without_the_peer_that_ended_them() -> None:
    started = []

    def start(journal: str, lost: list[str]) -> str:
        started.append(lost)
        for bad in ("a", "b"):
            if bad not in lost:
                Path(journal, "0").write_text(bad)
                Path(journal, "1").write_text(f"{bad}\nError: {bad} is bad")
                raise LaunchError("ended")
        return "samples"

    result, lost = launch_without(start)

    assert result == "samples" and started == [[], ["a"], ["a", "b"]]
    assert lost == {bad: f"rank 1: Error: {bad} is bad" for bad in "ab"}


def test_ranks_that_end_without_a_peer_end_the_benchmark() -> None:
    def start(journal: str, lost: list[str]) -> str:
        Path(journal, "0").write_text("")
        raise LaunchError("no GPU")

    with pytest.raises(LaunchError, match="no GPU"):
        launch_without(start)
