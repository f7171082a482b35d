"""The CUDA sources compile for every ring they serve, and are kept where nobody else may write."""

import hashlib
import itertools
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.channel import driver, memory, rows
from commlib.custom_allreduce import choose, norm, push
from commlib.errors import EngineError
from tests._examples import examples

HALF = 2 * push.WINDOW + push._SPARE  # bytes
HELD = (1, 2, norm.HELD)  # vectors of a thread


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, so that nothing is found compiled."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def names() -> Iterator[tuple[str, str]]:
    """Yield the file and the name of every kernel that the table may ask for."""
    kinds = [f"{dtype}_{op}" for dtype in choose.FLOATS.values() for op in ("sum", "max", "min")]
    for algorithm, kind in itertools.product(("one_shot", "two_shot", "scatter"), kinds):
        yield "all_reduce.cu", f"{algorithm}_{kind}"
    for algorithm, dtype in itertools.product(("one_shot", "two_shot"), choose.FLOATS.values()):
        yield "split.cu", f"{algorithm}_begin_{dtype}_sum"
        yield "split.cu", f"{algorithm}_end_{dtype}_sum"
    yield "packets.cu", "packets"
    norms = itertools.product(("norm_one_shot", "norm_two_shot"), choose.FLOATS.values(), HELD)
    for algorithm, dtype, held in norms:
        yield "norm.cu", f"{algorithm}_{dtype}_{held}"


@pytest.mark.parametrize("file", push.FILES)
def test_push_kernels_compile(home: Path, file: str) -> None:
    code = driver.binary(push.KERNELS / file, "sm_90", ("-DRANKS=2",))
    missing = [name for of, name in names() if of == file and name.encode() not in code]
    assert not missing


@pytest.mark.parametrize(
    ("file", "architecture", "size"),
    [("split.cu", "sm_80", 3), ("packets.cu", "sm_100", 5), ("split.cu", "sm_90", 8)],
)
def test_other_devices_and_rings(home: Path, file: str, architecture: str, size: int) -> None:
    assert driver.binary(push.KERNELS / file, architecture, (f"-DRANKS={size}",))


def test_row_kernel_compiles(home: Path) -> None:
    assert b"exchange_rows" in driver.binary(rows.KERNEL, "sm_90", ("-DSEGMENTS=32",))


def test_proof_compiles(home: Path) -> None:
    code = driver.binary(memory.PROOF, "sm_90")
    assert b"write_tokens" in code
    assert b"find_tokens" in code


def test_a_wrong_source_is_told(home: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong.cu").write_text("__global__ void f() { undeclared(); }")
    with pytest.raises(EngineError, match="undeclared"):
        driver.binary(tmp_path / "wrong.cu", "sm_90")


def test_what_is_compiled_is_kept(home: Path) -> None:
    source = home / "some.cu"
    source.write_text('extern "C" __global__ void some() {}')
    first = driver.binary(source, "sm_90")
    (kept,) = (home / ".cache/commlib/kernels").iterdir()
    assert kept.read_bytes().endswith(first)
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    kept.write_bytes(kept.read_bytes()[:-1])  # torn
    assert driver.binary(source, "sm_90") == first
    assert kept.read_bytes().endswith(first)
    (home / "more.cuh").write_text("// a header beside it is part of it")
    assert driver.binary(source, "sm_90", ("-DOTHER",))
    assert len(list(kept.parent.iterdir())) == 2


def test_a_folder_that_others_may_write_is_not_used(home: Path) -> None:
    place = home / ".cache/commlib/kernels"
    place.mkdir(parents=True)
    place.chmod(0o770)
    assert driver.folder() is None
    source = home / "some.cu"
    source.write_text('extern "C" __global__ void some() {}')
    assert driver.binary(source, "sm_90")
    assert not list(place.iterdir())
    place.rmdir()
    assert driver.folder() == place


def test_a_file_that_others_may_write_is_not_used(home: Path) -> None:
    """A folder that was open for a while may hold what somebody else has put there."""
    source = home / "some.cu"
    source.write_text('extern "C" __global__ void some() {}')
    code = driver.binary(source, "sm_90")
    (kept,) = (home / ".cache/commlib/kernels").iterdir()
    planted = hashlib.sha256(b"planted").digest() + b"planted"
    kept.write_bytes(planted)
    kept.chmod(0o666)
    assert driver.binary(source, "sm_90") == code
    (home / "elsewhere").write_bytes(planted)
    kept.unlink()
    kept.symlink_to(home / "elsewhere")
    assert driver.binary(source, "sm_90") == code
    assert not kept.is_symlink()


def test_folders_are_private_whatever_the_umask(home: Path) -> None:
    before = os.umask(0)
    try:
        place = driver.folder()
    finally:
        os.umask(before)
    assert place is not None
    assert {p.stat().st_mode & 0o777 for p in (place, place.parent, place.parent.parent)} == {0o700}


def test_one_file_by_many(home: Path) -> None:
    """Ranks that compile the same source at the same time all get the whole of it."""
    source = home / "some.cu"
    source.write_text('extern "C" __global__ void some() {}')
    with ThreadPoolExecutor(8) as ranks:
        found = set(ranks.map(lambda _: driver.binary(source, "sm_90"), range(24)))
    assert len(found) == 1
    (kept,) = (home / ".cache/commlib/kernels").iterdir()
    assert kept.read_bytes().endswith(found.pop())


def test_no_home_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert driver.folder() is None


# -- the choice ------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", push.VERBS)
@pytest.mark.parametrize("size", choose.SIZES)
def test_table(verb: str, size: int) -> None:
    """Rows ascend, name kernels that there are, and every ring the kernels serve has some."""
    found = choose.table()[verb][size]
    assert [row.most for row in found] == sorted({row.most for row in found})
    kinds = {"all_reduce": ("one_shot", "two_shot"), "reduce_scatter": ("scatter",)}
    kinds |= {norm.VERB: ("norm_one_shot", "norm_two_shot")}
    for row in found:
        assert row.kernel in (*kinds.get(verb, ("packets",)), "nccl")
        assert row.threads % 32 == 0
        assert 0 < row.threads <= (512 * norm.TEAM if verb == norm.VERB else 512)
        assert row.blocks > 0


@given(
    verb=st.sampled_from(push.VERBS),
    nbytes=st.integers(1, 1 << 33),
    size=st.integers(2, 20),
)
@examples(200)
def test_choice_is_pure(verb: str, nbytes: int, size: int) -> None:
    """The same at every call, the first row that holds the bytes, and NCCL beyond the last."""
    found = choose.choose(verb, nbytes, size)
    assert found == choose.choose(verb, nbytes, size)
    rows_of = choose.table()[verb].get(size, ())
    holding = [row for row in rows_of if row.most >= nbytes]
    assert found == (holding[0] if holding and holding[0].kernel != "nccl" else None)


@given(
    kernel=st.sampled_from(["one_shot", "two_shot", "scatter", "packets"]),
    size=st.sampled_from(choose.SIZES),
    below=st.integers(0, 4096),
)
@examples(200)
def test_calls_fit_into_the_channel(kernel: str, size: int, below: int) -> None:
    """The last slot of the largest call ends inside the half, however it is rounded."""
    nbytes = max(1, choose.room(kernel, HALF, size) - below)
    vectors = -(-nbytes // (8 if kernel == "packets" else 16))
    slots = 2 * size * -(-vectors // size) if kernel == "two_shot" else size * vectors
    assert slots * 16 <= HALF


@pytest.mark.parametrize("size", choose.SIZES)
@pytest.mark.parametrize("most", [1, norm.TEAM])
@pytest.mark.parametrize("threads", [32, 64, 256, norm.THREADS, 2 * norm.THREADS])
def test_rows_fit_into_blocks_and_the_channel(size: int, most: int, threads: int) -> None:
    """Each thread's vectors cover the row, there is a kernel for them, and a row has its slots."""
    for width in range(1, norm.WIDEST + 1):
        held, block, team = norm.block(width, threads, most)
        assert held in HELD
        assert team in {2**power for power in range(4) if 2**power <= most}
        assert width <= block * held * team < width + push.WARP * held * team
        assert block % push.WARP == 0
        assert 0 < block <= norm.THREADS
        for kernel, copies in (("norm_one_shot", size), ("norm_two_shot", 2)):
            slots = norm.slots(kernel, width, size)
            assert copies * width <= slots
            # One launch takes as many rows as fit; indices in the kernels have 32 bits.
            assert 0 < HALF // (slots * choose.VECTOR) * width < 2**31


def test_a_written_table_is_the_same(tmp_path: Path) -> None:
    choose.write(tmp_path / "table.json", choose.table())
    assert (tmp_path / "table.json").read_text() == choose.TABLE.read_text()


def test_what_is_left_to_nccl() -> None:
    assert choose.refusal(torch.bfloat16, "avg") is None
    assert "int32" in str(choose.refusal(torch.int32, "sum"))
    assert "prod" in str(choose.refusal(torch.float32, "prod"))


@pytest.mark.parametrize("size", choose.SIZES)
def test_every_rank_waits_in_the_first_hop(size: int) -> None:
    """Or knows it from one that does: two owners of slices at least."""
    two = choose.Row(1 << 20, "norm_two_shot", 512, 264)
    for width in range(1, 65):
        slice_ = -(-width // size)
        owners = -(-width // slice_)
        assert owners >= 2 or norm.kernel_of(two, width, size) == "norm_one_shot"


def test_version_follows_what_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = push.version()
    assert before == push.version() != 0
    monkeypatch.setattr(choose, "text", lambda: choose.TABLE.read_text() + "\n")
    assert push.version() != before


@pytest.mark.parametrize("file", ["push.py", "norm.py", "kernels/hops.cuh", "kernels/split.cu"])
def test_version_follows_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """What plans the launches is as much a part of the protocol as the kernels."""
    package = tmp_path / "custom_allreduce"
    shutil.copytree(push.KERNELS.parent, package)
    monkeypatch.setattr(push, "KERNELS", package / "kernels")
    before = push.version()
    (package / "kernels" / "notes.txt").write_text("no part of it")
    assert push.version() == before
    with (package / file).open("a") as text:
        text.write("\n")
    assert push.version() != before
