"""The CUDA sources compile for every ring they serve, and are kept where nobody else may write."""

import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.errors import EngineError
from commlib.p2p import (
    fused_norm,
    kernel_cache,
    kernel_table,
    nvrtc,
    peer_memory,
    push_channel,
    push_collectives,
)
from commlib.p2p.experts import rows as row_channels
from tests.support.examples import examples

HALF = 2 * push_channel.WINDOW + push_channel.SPARE  # bytes
HELD = (1, 2, fused_norm.HELD)  # vectors of a thread


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate home, so that nothing is found compiled."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def names() -> Iterator[tuple[str, str]]:
    """Yield the file and the name of every kernel that the table may ask for."""
    kinds = [
        f"{dtype}_{op}" for dtype in kernel_table.FLOATS.values() for op in ("sum", "max", "min")
    ]
    for algorithm, kind in itertools.product(("one_shot", "two_shot", "scatter"), kinds):
        yield "all_reduce.cu", f"{algorithm}_{kind}"
    for algorithm, dtype in itertools.product(
        ("one_shot", "two_shot"), kernel_table.FLOATS.values()
    ):
        yield "split.cu", f"{algorithm}_begin_{dtype}_sum"
        yield "split.cu", f"{algorithm}_end_{dtype}_sum"
    yield "packets.cu", "packets"
    yield "gate.cu", "gate"
    norms = itertools.product(
        ("norm_one_shot", "norm_two_shot"), kernel_table.FLOATS.values(), HELD
    )
    for algorithm, dtype, held in norms:
        yield "norm.cu", f"{algorithm}_{dtype}_{held}"


@pytest.mark.parametrize("file", push_collectives.FILES)
def test_push_kernels_compile(home: Path, file: str) -> None:
    code = nvrtc.binary(push_collectives.KERNELS / file, "sm_90", ("-DRANKS=2",))
    missing = [name for of, name in names() if of == file and name.encode() not in code]
    assert not missing


@pytest.mark.parametrize(
    ("file", "architecture", "size"),
    [("split.cu", "sm_80", 3), ("packets.cu", "sm_100", 5), ("split.cu", "sm_90", 8)],
)
def test_other_devices_and_rings(home: Path, file: str, architecture: str, size: int) -> None:
    assert nvrtc.binary(push_collectives.KERNELS / file, architecture, (f"-DRANKS={size}",))


def test_row_kernel_compiles(home: Path) -> None:
    assert b"exchange_rows" in nvrtc.binary(row_channels.KERNEL, "sm_90", ("-DSEGMENTS=32",))


def test_proof_compiles(home: Path) -> None:
    code = nvrtc.binary(peer_memory.PROBE, "sm_90")
    assert b"write_tokens" in code
    assert b"find_tokens" in code


def test_a_wrong_source_is_reported(home: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.cu").write_text("__global__ void f() { undeclared(); }")
    with pytest.raises(EngineError, match="undeclared"):
        nvrtc.binary(tmp_path / "wrong.cu", "sm_90")


def test_what_is_compiled_is_kept(home: Path) -> None:
    source = home / "some.cu"
    source.write_text('extern "C" __global__ void some() {}')
    first = nvrtc.binary(source, "sm_90")
    (cached,) = (home / ".cache/commlib/kernels").iterdir()
    assert cached.read_bytes().endswith(first)
    assert cached.parent.stat().st_mode & 0o777 == 0o700
    cached.write_bytes(cached.read_bytes()[:-1])  # torn
    assert nvrtc.binary(source, "sm_90") == first
    assert cached.read_bytes().endswith(first)
    (home / "more.cuh").write_text("// a header next to it is part of it")
    assert nvrtc.binary(source, "sm_90", ("-DOTHER",))
    assert len(list(cached.parent.iterdir())) == 2


def test_a_folder_that_others_may_write_is_not_used(home: Path) -> None:
    path = home / ".cache/commlib/kernels"
    path.mkdir(parents=True)
    path.chmod(0o770)
    assert kernel_cache.folder() is None
    source = home / "some.cu"
    source.write_text('extern "C" __global__ void some() {}')
    assert nvrtc.binary(source, "sm_90")
    assert not list(path.iterdir())
    path.rmdir()
    assert kernel_cache.folder() == path


def test_a_file_that_others_may_write_is_not_used(home: Path) -> None:
    """A folder that was open for a while may hold what somebody else has put there."""
    source = home / "some.cu"
    source.write_text('extern "C" __global__ void some() {}')
    code = nvrtc.binary(source, "sm_90")
    (cached,) = (home / ".cache/commlib/kernels").iterdir()
    planted = hashlib.sha256(b"planted").digest() + b"planted"
    cached.write_bytes(planted)
    cached.chmod(0o666)
    assert nvrtc.binary(source, "sm_90") == code
    (home / "elsewhere").write_bytes(planted)
    cached.unlink()
    cached.symlink_to(home / "elsewhere")
    assert nvrtc.binary(source, "sm_90") == code
    assert not cached.is_symlink()


def test_folders_are_private_whatever_the_umask(home: Path) -> None:
    before = os.umask(0)
    try:
        path = kernel_cache.folder()
    finally:
        os.umask(before)
    assert path is not None
    assert {p.stat().st_mode & 0o777 for p in (path, path.parent, path.parent.parent)} == {0o700}


def test_one_file_by_many(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that need the same code at the same time all get the whole of it; one compiles it."""
    source = home / "some.cu"
    source.write_text('extern "C" __global__ void some() {}')
    compiled, compile_source = [], nvrtc._compile

    def counted(*args: Any) -> bytes:
        compiled.append(args)
        time.sleep(0.2)  # the others come meanwhile
        return compile_source(*args)

    monkeypatch.setattr(nvrtc, "_compile", counted)
    with ThreadPoolExecutor(8) as ranks:
        binaries = set(ranks.map(lambda _: nvrtc.binary(source, "sm_90"), range(24)))
    assert len(binaries) == 1
    assert len(compiled) == 1
    (cached,) = (home / ".cache/commlib/kernels").iterdir()
    assert cached.read_bytes().endswith(binaries.pop())


def test_a_compiler_that_does_not_end_stops_nobody(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank waits for another one's compiler only so long, and a killed one holds no lock."""
    source, path = home / "some.cu", kernel_cache.folder()
    source.write_text('extern "C" __global__ void some() {}')
    holding = f"""
import fcntl, os, time
fcntl.flock(os.open({str(path)!r}, os.O_RDONLY), fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", holding], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        monkeypatch.setattr(kernel_cache, "_TURN_S", 0.2)
        assert nvrtc.binary(source, "sm_90")
        holder.kill()
    monkeypatch.setattr(kernel_cache, "_TURN_S", 600.0)
    assert nvrtc.binary(source, "sm_90", ("-DOTHER",))


def test_no_home_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert kernel_cache.folder() is None


# -- the choice ------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", push_channel.COLLECTIVES)
@pytest.mark.parametrize("size", kernel_table.SIZES)
def test_table(collective: str, size: int) -> None:
    """Rows ascend, name kernels that there are, and every ring the kernels serve has some."""
    rows = kernel_table.table()[collective][size]
    assert [row.most for row in rows] == sorted({row.most for row in rows})
    kinds = {"all_reduce": ("one_shot", "two_shot"), "reduce_scatter": ("scatter",)}
    kinds |= {fused_norm.COLLECTIVE: ("norm_one_shot", "norm_two_shot")}
    for row in rows:
        assert row.kernel in (*kinds.get(collective, ("packets",)), "nccl")
        assert row.threads % 32 == 0
        most = 512 * fused_norm.TEAM if collective == fused_norm.COLLECTIVE else 512
        assert 0 < kernel_table.shape(row, 1, size)[1] <= most
        assert row.blocks > 0


@given(
    collective=st.sampled_from(push_channel.COLLECTIVES),
    nbytes=st.integers(1, 1 << 33),
    size=st.integers(2, 20),
)
@examples(200)
def test_choice_is_pure(collective: str, nbytes: int, size: int) -> None:
    """The same at every call, the first row that holds the bytes, and NCCL beyond the last."""
    chosen = kernel_table.select_kernel(collective, nbytes, size)
    assert chosen == kernel_table.select_kernel(collective, nbytes, size)
    rows_of = kernel_table.table()[collective].get(size, ())
    holding = [row for row in rows_of if row.most >= nbytes]
    assert chosen == (holding[0] if holding and holding[0].kernel != "nccl" else None)


@given(
    kernel=st.sampled_from(["one_shot", "two_shot", "scatter", "packets"]),
    size=st.sampled_from(kernel_table.SIZES),
    below=st.integers(0, 4096),
)
@examples(200)
def test_calls_fit_into_the_channel(kernel: str, size: int, below: int) -> None:
    """The last slot of the largest call ends inside the half, however it is rounded."""
    nbytes = max(1, kernel_table.room(kernel, HALF, size) - below)
    vectors = -(-nbytes // (8 if kernel == "packets" else 16))
    slots = 2 * size * -(-vectors // size) if kernel == "two_shot" else size * vectors
    assert slots * 16 <= HALF


@pytest.mark.parametrize("size", kernel_table.SIZES)
@pytest.mark.parametrize("most", [1, fused_norm.TEAM])
@pytest.mark.parametrize("threads", [32, 64, 256, fused_norm.THREADS, 2 * fused_norm.THREADS])
def test_rows_fit_into_blocks_and_the_channel(size: int, most: int, threads: int) -> None:
    """Each thread's vectors cover the row, there is a kernel for them, and a row has its slots."""
    for width in range(1, fused_norm.WIDEST + 1):
        held, block, team = fused_norm.block(width, threads, most)
        assert held in HELD
        assert team in {2**power for power in range(4) if 2**power <= most}
        assert width <= block * held * team < width + push_channel.WARP * held * team
        assert block % push_channel.WARP == 0
        assert 0 < block <= fused_norm.THREADS
        for kernel, copies in (("norm_one_shot", size), ("norm_two_shot", 2)):
            slots = fused_norm.slots(kernel, width, size)
            assert copies * width <= slots
            # One launch takes as many rows as fit; indices in the kernels have 32 bits.
            assert 0 < HALF // (slots * kernel_table.VECTOR) * width < 2**31


def test_a_written_table_is_the_same(tmp_path: Path) -> None:
    kernel_table.write(tmp_path / "table.json", kernel_table.table())
    assert (tmp_path / "table.json").read_text() == kernel_table.TABLE.read_text()


def test_what_is_left_to_nccl() -> None:
    assert kernel_table.refusal(torch.bfloat16, "avg") is None
    assert "int32" in str(kernel_table.refusal(torch.int32, "sum"))
    assert "prod" in str(kernel_table.refusal(torch.float32, "prod"))


@pytest.mark.parametrize("size", kernel_table.SIZES)
def test_every_rank_waits_in_the_first_hop(size: int) -> None:
    """Or knows it from one that does: two owners of slices at least."""
    two = kernel_table.Row(1 << 20, "norm_two_shot", 512, 264)
    for width in range(1, 65):
        slice_ = -(-width // size)
        owners = -(-width // slice_)
        assert owners >= 2 or fused_norm.kernel_of(two, width, size) == "norm_one_shot"


def test_version_follows_what_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = push_collectives.version()
    assert before == push_collectives.version() != 0
    monkeypatch.setattr(kernel_table, "text", lambda: kernel_table.TABLE.read_text() + "\n")
    assert push_collectives.version() != before


@pytest.mark.parametrize(
    "file",
    ["push_collectives.py", "push_channel.py", "fused_norm.py", "csrc/hops.cuh", "csrc/split.cu"],
)
def test_version_follows_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """What plans the launches is as much a part of the protocol as the kernels."""
    package = tmp_path / "p2p"
    shutil.copytree(push_collectives.KERNELS.parent, package)
    monkeypatch.setattr(push_collectives, "KERNELS", package / "csrc")
    before = push_collectives.version()
    (package / "csrc" / "notes.txt").write_text("no part of it")
    assert push_collectives.version() == before
    with (package / file).open("a") as text:
        text.write("\n")
    assert push_collectives.version() != before
