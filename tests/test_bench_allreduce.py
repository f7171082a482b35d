"""`commlib bench allreduce`: what it makes of its figures, its checks and its plot, anywhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import image

from commlib.tools.bench import allreduce_report
from commlib.tools.bench.allreduce_norm import exact_norm, normalised
from commlib.tools.bench.allreduce_report import multicast
from commlib.tools.bench.peers.way import Near, Way, exact_sum
from commlib.tools.bench.peers.ways import check
from commlib.tools.bench.plot import size_label
from commlib.tools.bench.report import Report, write

FACTS = (("date", "2026-01-02T03:04:05Z"), ("CPU", "some model"), ("GPUs", "8 x some model"))
OURS, NCCL = "ring.all_reduce(out, x)", "NCCL"
ONE_SHOT, TWO_SHOT = "symm_mem one-shot", "symm_mem two-shot"
EAGER, DIST = "ops.all_reduce(x, out=x)", "dist.all_reduce(x)"
SYMM, FUSED = "symm_mem.one_shot_all_reduce(x)", "ops.all_reduce_residual_norm"
NCCL_NORM, ONE_SHOT_NORM = f"{NCCL} + compiled norm", f"{ONE_SHOT} + compiled norm"
SMALL = ("1 KiB", "4 KiB", "16 KiB", "64 KiB")
MIDDLE = ("128 KiB", "256 KiB", "512 KiB", "1 MiB")
LARGE = ("4 MiB", "16 MiB", "64 MiB")

Times = dict[str, list[float]]


def samples(microseconds: Mapping[str, float]) -> Times:
    """Two rounds in which each call takes the same time."""
    return {name: [time / 1e6] * 2 for name, time in microseconds.items()}


def sized(sizes: tuple[str, ...], microseconds: Mapping[str, float]) -> dict[str, Times]:
    return {size: samples(microseconds) for size in sizes}


def found(**changes: dict[str, Any]) -> dict[str, Any]:
    """Samples in which we take 0.4 of the best peer: one-shot, then two-shot, then NCCL."""
    samples: dict[str, dict[str, Any]] = {
        "graph": {
            **sized(SMALL, {OURS: 2, NCCL: 12, ONE_SHOT: 5, TWO_SHOT: 8}),
            **sized(MIDDLE, {OURS: 4, NCCL: 20, ONE_SHOT: 30, TWO_SHOT: 10}),
            **sized(LARGE, {OURS: 40, NCCL: 100, TWO_SHOT: 110}),
        },
        "eager": sized(("1 KiB", "64 KiB"), {EAGER: 5, OURS: 3, DIST: 40, SYMM: 10}),
        "fused": sized(("1 x 8192", "8 x 8192"), {FUSED: 4, NCCL_NORM: 20, ONE_SHOT_NORM: 8}),
        "carriers": dict.fromkeys((*SMALL, *MIDDLE), "push") | dict.fromkeys(LARGE, "nccl"),
        "failed": {},
    }
    return samples | {kind: samples[kind] | change for kind, change in changes.items()}


def report(found: dict[str, Any], nproc: int = 2, libraries: str | None = None) -> Report:
    settings = {"nproc": nproc, "rounds": 2}
    return allreduce_report.report(found, settings, "Multicast?", libraries)


# -- table and findings --------------------------------------------------------------------------


def test_rows() -> None:
    made = report(found())

    assert made.columns[:3] == ("kind", "size", "call")
    assert {len(row) for row in made.rows} == {len(made.columns)}
    by_name = {row[:3]: row[3:] for row in made.rows}
    assert len(by_name) == len(made.rows) == 4 * 8 + 3 * 3 + 4 * 2 + 3 * 2
    ours = ("2.00", "2.00..2.00", "0.40 (0.40..0.40)")
    assert by_name["graph", "4 KiB", OURS] == ours
    assert by_name["graph", "64 MiB", TWO_SHOT][-1] == "1.10 (1.10..1.10)"
    assert by_name["eager", "64 KiB", EAGER][-1] == "0.50 (0.50..0.50)"
    assert by_name["fused", "8 x 8192", FUSED][-1] == "0.50 (0.50..0.50)"
    assert "over 2 GPUs" in made.caption and made.caption.endswith("Multicast?")
    assert made.command == "commlib bench allreduce --nproc 2 --rounds 2"


@pytest.mark.parametrize(
    ("nproc", "limits"),
    [(2, (0.42, 0.55, 0.85)), (4, (0.50, 0.65, 0.90)), (8, (0.48, 0.70, 0.92))],
)
def test_targets_of_each_number_of_gpus(nproc: int, limits: tuple[float, ...]) -> None:
    classes = report(found(), nproc).findings[:3]

    spans = ("1 KiB..64 KiB", "128 KiB..1 MiB", "4 MiB..64 MiB")
    for finding, span, limit in zip(classes, spans, limits, strict=True):
        assert finding.startswith(
            f"met: graph, {span}, {OURS} / the best peer of torch, at worst ("
        )
        assert finding.endswith(f": 0.40, target at most {limit:.2f}")
    for finding, peer in zip(classes, (ONE_SHOT, TWO_SHOT, NCCL), strict=True):
        assert f", {peer})" in finding


def test_no_target_for_other_numbers() -> None:
    classes = report(found(), 3).findings[:3]

    assert all(finding.endswith("0.40; no target on 3 GPUs") for finding in classes)
    assert not any(finding.startswith(("met", "missed")) for finding in classes)


def test_one_bad_size_misses_the_target_of_its_class() -> None:
    slow = {"16 KiB": samples({OURS: 6, NCCL: 7, ONE_SHOT: 9, TWO_SHOT: 8})}

    first, second, _ = report(found(graph=slow)).findings[:3]

    assert first.startswith("missed: ") and f"at worst (16 KiB, {NCCL}): 0.86" in first
    assert second.startswith("met: ")


def test_eager_findings() -> None:
    slow = {"64 KiB": samples({EAGER: 8, OURS: 3, DIST: 32, SYMM: 20})}

    host, symmetric, distributed = report(found(eager=slow)).findings[3:6]

    assert host == f"missed: eager, {EAGER}, at worst: 8.00 µs, target at most 7.00 µs"
    assert symmetric.startswith("met: ") and f"{SYMM}, at worst (1 KiB): 0.50" in symmetric
    assert distributed.startswith("missed: ") and "at worst (64 KiB): 0.25" in distributed


def test_norm_findings() -> None:
    slow = {"8 x 8192": samples({FUSED: 9, NCCL_NORM: 10, ONE_SHOT_NORM: 12})}

    assert (
        report(found())
        .findings[6]
        .startswith(f"met: fused, {FUSED} / the best peer of torch, at worst")
    )
    missed = report(found(fused=slow)).findings[6]
    assert missed.endswith(f"at worst (8 x 8192, {NCCL_NORM}): 0.90, target at most 0.55")
    assert missed.startswith("missed: ")
    absent = report(found() | {"fused": {}})
    assert absent.findings[6] == f"fused: this commlib has no {FUSED}"
    assert "fused" not in {row[0] for row in absent.rows}


def test_what_carries_is_said_once() -> None:
    assert report(found()).findings[7:] == (
        "ring 0, 1 KiB..1 MiB: push",
        "ring 0, 4 MiB..64 MiB: nccl",
    )
    alone = report(found(carriers={"64 MiB": "its own ring"})).findings[-1]
    assert alone == "ring 0, 64 MiB: its own ring"


def test_multicast_is_said() -> None:
    off = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    on = {"NCCL_NVLS_ENABLE": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "0"}

    assert multicast(off).endswith(
        "is off by NCCL_NVLS_ENABLE=0, TORCH_SYMM_MEM_DISABLE_MULTICAST=1."
    )
    for left in ({}, on):
        assert multicast(left) == "NVLink multicast is left to NCCL and torch."


# -- plot ----------------------------------------------------------------------------------------


def test_the_plot_is_next_to_the_table(tmp_path: Path) -> None:
    made = report(found())

    files = [write(tmp_path, made, FACTS, ranks) for ranks in (2, 8)]

    assert [file.name for file in files] == [
        "allreduce-2gpu.md",
        "allreduce-8gpu.md",
    ]
    for file in files:
        picture = file.with_suffix(".png")
        assert file.read_text().endswith(f"\n\n![allreduce]({picture.name})\n")
        height, width, _ = image.imread(picture).shape
        assert width > height > 400


@pytest.mark.parametrize(
    ("nbytes", "label"), [(4, "4 B"), (1024, "1 KiB"), (1536, "1536 B"), (2**26, "64 MiB")]
)
def test_sizes_are_named(nbytes: int, label: str) -> None:
    assert size_label(nbytes) == label


# -- what is right -------------------------------------------------------------------------------


def drawn(*shape: int, parts: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).bfloat16() for _ in range(parts)]


def test_a_rounded_sum_is_right_and_a_part_of_it_is_not() -> None:
    parts = drawn(4096, parts=8)
    rounded = torch.zeros_like(parts[0])
    for part in parts:
        rounded += part

    near = exact_sum(parts)

    assert near.holds(rounded)
    assert not near.holds(rounded - parts[3])
    assert not near.holds(rounded.masked_fill(torch.arange(4096) == 7, torch.nan))


def test_a_norm_of_the_sum_is_right_and_one_without_the_residual_is_not() -> None:
    *parts, residual, noise = drawn(4, 256, parts=4)
    weight = 1 + 0.1 * noise[0]
    added = sum(parts, torch.zeros_like(residual))

    nears = exact_norm(exact_sum(parts), residual, weight)

    right = normalised(added, residual, weight)
    wrong = normalised(added, torch.zeros_like(residual), weight)
    assert [near.holds(one) for near, one in zip(nears, right, strict=True)] == [True, True]
    assert [near.holds(one) for near, one in zip(nears, wrong, strict=True)] == [False, False]


def test_a_wrong_way_is_named() -> None:
    x = torch.zeros(5)
    expected = (Near(torch.zeros(5, dtype=torch.float64), torch.zeros(5)),)

    assert check("right", Way(x, lambda: x.mul_(2)), expected)
    with pytest.raises(AssertionError, match=r"wrong: wrong result for \(5,\)"):
        check("wrong", Way(x, lambda: (x + 1,)), expected)


# -- peers of other projects ---------------------------------------------------------------------

SGLANG, FLASHINFER = "SGLang one-shot push", "FlashInfer one-shot"
FAST = f"{FLASHINFER}, fused"


def with_peers() -> dict[str, Any]:
    """As ``found``, with one peer that is faster than torch's and failed at 64 MiB."""
    sums = {
        **sized(SMALL, {SGLANG: 1.6}),
        **sized(MIDDLE, {SGLANG: 4}),
        **sized(LARGE[:2], {SGLANG: 50}),
    }
    norms = {"1 x 8192": samples({FAST: 5}), "8 x 8192": samples({FAST: 4.4, f"{SGLANG} + x": 1})}
    merged = found()
    for kind, more in (("graph", sums), ("fused", norms)):
        merged[kind] = {size: times | more.get(size, {}) for size, times in merged[kind].items()}
    reasons = dict.fromkeys(("graph, 16 MiB", "graph, 64 MiB"), "rank 1: x")
    return merged | {"failed": {SGLANG: reasons, "libvllm.so": {"run": "hung"}}}


def test_targets_over_all_peers() -> None:
    made = report(with_peers(), libraries="libraries of peers: libsgl.so")

    assert made.command == "commlib bench allreduce --nproc 2 --rounds 2 --peers FOLDER"
    assert (
        "kernels of other projects" in made.caption
        and "libraries of peers: libsgl.so" in made.findings
    )
    of_all = [finding for finding in made.findings if "the best of all peers" in finding]
    assert len(of_all) == len((*SMALL, *MIDDLE, *LARGE))
    label = f"{OURS} / the best of all peers"
    assert of_all[0] == f"missed: graph, 1 KiB, {label} ({SGLANG}): 1.25, target at most 1.00"
    assert of_all[7] == f"met: graph, 1 MiB, {label} ({SGLANG}): 1.00, target at most 1.00"
    assert of_all[8] == f"met: graph, 4 MiB, {label} ({SGLANG}): 0.80, target at most 0.97"
    assert of_all[10] == f"met: graph, 64 MiB, {label} ({NCCL}): 0.40, target at most 0.97"
    rows = {row[:3]: row[-1] for row in made.rows}
    assert rows["graph", "1 KiB", OURS].startswith("1.25 ")
    torch_alone = [finding for finding in made.findings if "peer of torch" in finding]
    assert torch_alone == [
        finding for finding in report(found()).findings if "peer of torch" in finding
    ]


def test_targets_over_the_fused_kernel_of_flashinfer() -> None:
    findings = report(with_peers(), libraries="libraries").findings

    over = [finding for finding in findings if FAST in finding]
    assert over == [
        f"met: fused, 1 x 8192, {FUSED} / {FAST}: 0.80, target at most 0.85",
        f"missed: fused, 8 x 8192, {FUSED} / {FAST}: 0.91, target at most 0.85",
    ]
    assert not any("FlashInfer" in finding for finding in report(found(), libraries="x").findings)


def test_failures_are_findings() -> None:
    findings = report(with_peers(), libraries="libraries").findings

    assert f"failed: {SGLANG}, graph, 16 MiB..graph, 64 MiB: rank 1: x" in findings
    assert "failed: libvllm.so, run: hung" in findings


def test_without_any_peer_at_a_size() -> None:
    alone = {size: samples({OURS: 2}) for size in SMALL}

    made = report(found(graph=alone), libraries="libraries")

    assert made.findings[0] == "graph, 1 KiB..64 KiB: every peer of torch failed"
    rows = {row[:3]: row[-1] for row in made.rows}
    assert rows["graph", "1 KiB", OURS] == "-"
    assert not any(finding.startswith("met: graph, 1 KiB,") for finding in made.findings)
