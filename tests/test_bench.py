"""`commlib bench`: its statistics, its files, its refusals, and every benchmark in a tiny form."""

import io
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from commlib import ops
from commlib.tools.bench import decode, dispatch, gloo, host, import_time, memory, overlap
from commlib.tools.bench.busy import busy_host
from commlib.tools.bench.command import BENCHMARKS, run_bench
from commlib.tools.bench.launch import launch
from commlib.tools.bench.report import (
    NEEDS_GPUS,
    Report,
    number,
    show,
    target,
    timing_columns,
    timing_rows,
    write,
)
from commlib.tools.bench.rounds import WARM_ROUNDS, race, ratio, spread, turns
from commlib.tools.launch import LaunchError
from tests.support.processes import run

SETTINGS = {"nproc": 2, "rounds": 2}
FACTS = (("date", "2026-01-02T03:04:05Z"), ("CPU", "some | model"), ("GPUs", "none"))
HOST = (
    *("bare CuPy", "dist.all_reduce(x)", "comm.all_reduce(out, x)", "ops.all_reduce(x)"),
    *("ops.all_reduce(x, out=x)", "ops.all_reduce(x, out=x, use_calc_stream=False)"),
    "symm_mem.one_shot_all_reduce(x)",
)
GLOO = (
    *("ops.all_reduce(x, out=x)", "dist.all_reduce(x)"),
    *("ops.all_reduce(x)", "dist.all_reduce(x.clone())"),
    'dist.all_reduce(x), backend "commlib"',
)
MEMORY = {
    "flag on": (
        *("CUDA context, one tensor", "commlib.init(): ring 0", "first ops.all_reduce(x)"),
        *("ring.connect()", "ring.suspend()", "ring.resume()"),
        *("new_ring(1, all ranks), first call", "new_ring(2, [0]): one rank"),
        "first dist.all_reduce(x)",
    ),
    "flag off": (
        *("CUDA context, one tensor", "commlib.init(): ring 0", "first ops.all_reduce(x)"),
        *("ring.connect()", "ring.suspend()", "ring.resume()"),
        *("new_ring(1, all ranks), first call", "new_ring(2, [0]): one rank"),
    ),
    "torch.distributed": (
        *("CUDA context, one tensor", "first dist.all_reduce(x)"),
        "dist.new_group(), first call",
    ),
}
SUMS = (
    *("ring.all_reduce(out, x)", "NCCL", "symm_mem one-shot", "symm_mem two-shot"),
    "NCCL, symmetric windows",
)
ALLREDUCE = {
    **{
        f"graph | {size}": SUMS
        for size in (
            *("1 KiB", "4 KiB", "16 KiB", "64 KiB", "128 KiB", "256 KiB", "512 KiB"),
            *("1 MiB", "4 MiB", "16 MiB"),
        )
    },
    "graph | 64 MiB": (*SUMS[:2], *SUMS[3:]),
    **{
        f"eager | {size}": (
            *("ops.all_reduce(x, out=x)", "ring.all_reduce(out, x)", "dist.all_reduce(x)"),
            "symm_mem.one_shot_all_reduce(x)",
        )
        for size in ("1 KiB", "64 KiB")
    },
    **{
        f"fused | {tokens} x 8192": (
            "ops.all_reduce_residual_norm",
            *(f"{way} + compiled norm" for way in SUMS[1:]),
        )
        for tokens in ((1, 8, 32, 128) if hasattr(ops, "all_reduce_residual_norm") else ())
    },
}
BY_HAND = ("graph.capture", "CUDAGraph by hand")
CAPTURE = {
    "sequence | host time, µs": (*BY_HAND, "eager"),
    "sequence | wall time, µs": (*BY_HAND, "eager"),
    "module | wall time, µs": (
        "graph.capture",
        *(f'graph.capture, gradients="{way}"' for way in ("borrow", "accumulate")),
        *("make_graphed_callables", "eager"),
    ),
    "tiny | host time, µs": (*BY_HAND, "eager"),
    "memory | reserved, MiB": BY_HAND,
}
DECODE = (decode.OURS, decode.BY_NCCL, decode.LEGACY, decode.REDUCTIONS, decode.BARE)
OVERLAP = ("matmul 4096", "matmul 8192", "attention", "softmax", "elementwise")
ON_GPUS = torch.cuda.device_count() >= 2
C10D = ('backend "commlib"', "torch's own backend")
FSDP_TP = ("backend=commlib.graph.backend", "torch.compile", "eager")
PEERS = {
    "host": {f"{load} | {call}" for load in ("idle", "busy") for call in HOST},
    "gloo": {f"{size} | {call}" for size in ("4 B", "64 KiB", "4 MiB") for call in GLOO},
    "import": {"import torch", "import torch, commlib", "import commlib after torch"},
    "memory": {f"{program} | {step}" for program, steps in MEMORY.items() for step in steps},
    "cross-entropy": {"ops.softmax_with_cross_entropy", "composition"},
    "experts": {
        "global_scatter + global_gather",
        "the same, FLAGS_comm_channel_mib=0",
        "a group of sends and receives an expert",
        "all_to_all_single, packed",
    },
    "dispatch": {
        f"{tokens} | {way} | {call}"
        for tokens in dispatch.TOKENS["nccl" if torch.cuda.device_count() >= 2 else "gloo"]
        for way, calls in dispatch.CALLS.items()
        for call in calls
    },
    "decode": {f"{batch} | {call}" for batch in decode.BATCHES for call in DECODE},
    "class-center": {
        "ops.class_center_sample",
        "ops.class_center_sample, padded",
        "legacy algorithm",
        "torch.sort alone",
    },
    "attention": {
        *("ops.fused_attention", "ops.fused_attention, compiled"),
        *("torch modules + torch.distributed", "the same, torch.compile"),
        *("gradients of the QKV layer", "the same, all_reduce before the weight's"),
    },
    "lamb": {
        "ops.DistributedFusedLamb",
        "ops.DistributedFusedLamb, captured",
        "foreach LAMB, bucketed all_reduce",
    },
    "allreduce": {f"{point} | {call}" for point, calls in ALLREDUCE.items() for call in calls},
    "capture": {f"{point} | {call}" for point, calls in CAPTURE.items() for call in calls},
    "compiled": {
        f"{kind} | {call}"
        for kind in ("pass | wall time, µs", "forward | host time, µs")
        for call in ("backend=commlib.graph.backend", "mode=reduce-overhead", "torch.compile")
    },
    "quantized": {
        f"{batch} | {call}"
        for batch in (1, 8, 64)
        for call in ("int8", "fp8", "int8, converted to bfloat16 in each call", "bfloat16")
    },
    "overlap": {
        f"{compute} | {during} | {peer}"
        for compute in OVERLAP
        for during in ("a peer is late", "all_reduces queued")
        for peer in ("push kernels", "NCCL")
    },
    "fsdp-tp": {
        *(
            f"{size}-bound | step, ms | {call}"
            for size in ("launch", "compute")
            for call in FSDP_TP
        ),
        *(
            f"compute-bound | memory, MiB | {call}"
            for call in (*FSDP_TP, f"{FSDP_TP[0]}, a replay verified")
            if ON_GPUS
        ),
    },
    "c10d": {
        *(f"dist.all_reduce, 4 B | host time, µs | {peer}" for peer in C10D),
        *(
            f"{program} | {figure} | {peer}"
            for program in ("DDP", "FSDP2")
            for figure in ("step, ms", "memory, MiB")[: 1 + ON_GPUS]
            for peer in C10D
        ),
    },
    "c10d-decode": {f"{way} | {peer}" for way in ("eager", "captured") for peer in C10D},
}


def check(path: Path, name: str) -> None:
    """Check that ``path`` holds a whole report: caption, machine, every peer, findings."""
    text = path.read_text()
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert heads == [f"# {name}", "## Run", "## Result", "## Findings"]
    run, result = text.split("## Run")[1].split("## Findings")[0].split("## Result")
    assert f"| command | `commlib bench {name} --" in run
    for fact in ("date", "CPU", "cores", "GPUs", "load at the start", "python", "torch"):
        assert re.search(rf"^\| {fact} \| [^|]+ \|$", run, re.MULTILINE), fact
    rows = [line.strip("| ") for line in result.strip().splitlines()]
    assert len({row.count(" | ") for row in rows}) == 1
    heads_of_rows = PEERS[name]
    assert len(rows) == 2 + len(heads_of_rows)
    for peer in heads_of_rows:
        assert sum(row.startswith(f"{peer} | ") for row in rows) == 1, peer
    findings = text.split("## Findings")[1]
    assert findings.count("\n- ") >= 1 and "DIFFER" not in findings
    for apart in re.findall(r"differ by at most (\S+)", findings):
        assert float(apart) < (5e-2 if torch.cuda.is_available() else 1e-5)


@pytest.mark.usefixtures("warm_launches")
def test_all_that_run_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench((), str(tmp_path), rounds=1) == 0

    said = capsys.readouterr()
    for name, benchmark in BENCHMARKS.items():
        written = list(tmp_path.glob(f"{name}-2?pu.md"))
        if benchmark.refusal(2):
            assert not written and f"{name} is left out: {benchmark.refusal(2)}" in said.err
        else:
            check(written[0], name)
            assert written[0].with_suffix(".png").exists() == (name == "allreduce")
            assert "arget" in said.out or name == "memory"
    if not torch.cuda.is_available():
        lines = [line for line in said.out.splitlines() if line.startswith(NEEDS_GPUS)]
        # one of most, two of class-center, three of decode, four of attention, five of c10d, six of
        # fsdp-tp, eight of dispatch; two of c10d-decode, which needs transformers
        assert len(lines) == (31 if BENCHMARKS["c10d-decode"].refusal(2) else 33)


@pytest.mark.parametrize(
    "name", ["host", "memory", "allreduce", "capture", "compiled", "quantized", "overlap"]
)
def test_asked_for_more_gpus_than_there_are(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = torch.cuda.device_count()

    assert run_bench(("import", name), str(tmp_path), nproc=gpus + 2) == 2

    assert f"{name} can't run here: {gpus + 2} ranks need" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("names", "options", "said"),
    [
        (("nix",), {}, "no benchmark 'nix'; benchmarks here: host, gloo, import, memory, "),
        (("gloo",), {"nproc": 1}, "pass --nproc 2"),
        (("host",), {"nproc": 1}, "pass --nproc 2"),
        (("allreduce",), {"nproc": 1}, "pass --nproc 2"),
        (("capture",), {"nproc": 0}, "0 ranks: expected 1 or more; pass --nproc 2"),
        (("gloo",), {"rounds": 0}, "pass --rounds 10"),
    ],
)
def test_refusals(
    names: tuple[str, ...], options: dict[str, int], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_bench(names, None, **options) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("warm_launches")
def test_a_failed_run_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLAGS_comm_timeout_s", "soon")
    with pytest.raises(LaunchError, match=r"gloo: exit code 1(?s:.*)FLAGS_comm_timeout_s='soon'"):
        launch("gloo", 2, rounds=1)

    assert run_bench(("import",), None, rounds=1) == 1
    assert "import failed: import torch, commlib: exit code 1" in capsys.readouterr().err


# -- what the GPU benchmarks make of their figures, on any machine -------------------------------


def host_samples() -> dict[str, list[float]]:
    """Two rounds in which everything takes 6 µs, but the peer 10 and the bare call 4."""
    times = dict.fromkeys(HOST, 6e-6) | {"bare CuPy": 4e-6, "dist.all_reduce(x)": 1e-5}
    return {name: [time, time] for name, time in times.items()}


def test_host_report() -> None:
    busy = host_samples() | {"ops.all_reduce(x, out=x)": [9e-6, 9e-6]}

    report = host.report({"idle": host_samples(), "busy": busy}, SETTINGS)

    assert {f"{row[0]} | {row[1]}" for row in report.rows} == PEERS["host"]
    assert report.command == "commlib bench host --nproc 2 --rounds 2"
    row = next(row for row in report.rows if row[:2] == ("idle", "ops.all_reduce(x, out=x)"))
    ratios = ("1.50 (1.50..1.50)", "0.60 (0.60..0.60)")
    assert row[2:] == ("6.00", "6.00..6.00", "2.00", *ratios)
    over_symm = "ops.all_reduce(x, out=x) / symm_mem.one_shot_all_reduce(x)"
    assert report.findings[2:] == (
        f"missed: idle host, {over_symm}: 1.00, target at most 0.90",
        f"missed: busy host, {over_symm}: 1.50, target at most 0.90",
    )
    over, against = report.findings[:2]
    assert over == "met: ops.all_reduce(x, out=x) over bare CuPy: 2.00 µs, target at most 2.50 µs"
    assert against.startswith("met: ") and against.endswith(": 0.60, target at most 0.65")


def test_a_missed_target_says_so() -> None:
    slow = host_samples() | {"ops.all_reduce(x, out=x)": [8e-6, 8e-6]}

    over, against = host.report({"idle": slow, "busy": host_samples()}, SETTINGS).findings[:2]

    assert over.startswith("missed: ") and against.startswith("missed: ")


def test_a_busy_host_spins_on_every_core_and_is_idle_again() -> None:
    with busy_host() as spinning:
        assert len(spinning) == len(os.sched_getaffinity(0))
        assert all(process.poll() is None for process in spinning)
    assert all(process.returncode == -signal.SIGKILL for process in spinning)


def test_no_process_spins_after_its_parent() -> None:
    orphans = "from commlib.tools.bench.busy import busy_host\nimport os\n"
    orphans += "busy = busy_host()\nprint(*(one.pid for one in busy.__enter__()), flush=True)\n"
    code, out, err = run("-c", orphans + "os._exit(3)", fresh=True)  # no end of the block

    assert code == 3 and out, err
    end = time.monotonic() + 20
    while any(_spins(int(pid)) for pid in out.split()):
        assert time.monotonic() < end
        time.sleep(0.05)


def _spins(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def memory_runs(*, initialised: bool = False) -> dict[str, list[list[dict[str, Any]]]]:
    """Two runs of each program; a step takes 0 MiB in the first run and 2 MiB in the second."""
    engine = {"flag on": ["nccl"], "flag off": ["c10d"], "torch.distributed": []}
    return {
        program: [
            [
                {
                    "step": step,
                    "taken": number * 2**21,
                    "process": None if program == "flag off" else 2**30,
                    "communicators": engine[program],
                    "initialised": initialised or "dist" in step,
                }
                for step in steps
            ]
            for number in range(2)
        ]
        for program, steps in MEMORY.items()
    }


def test_memory_report() -> None:
    report = memory.report(memory_runs(), SETTINGS)

    assert [row[:2] for row in report.rows] == [
        (p, s) for p, steps in MEMORY.items() for s in steps
    ]
    by_name = {row[:2]: row[2:] for row in report.rows}
    figures = ("1.00", "0.00..2.00")
    assert by_name["flag on", "commlib.init(): ring 0"] == (*figures, "1024", "nccl", "no")
    off = (*figures, "not available", "c10d", "no")
    assert by_name["flag off", "commlib.init(): ring 0"] == off
    assert by_name["torch.distributed", "first dist.all_reduce(x)"][-2:] == ("none", "yes")
    none, alone = report.findings
    assert none.endswith("initialised: no; engines of all communicators: nccl")
    assert alone.endswith("one rank: at most 2097152 bytes")


def test_overlap_report() -> None:
    late, queued = "a peer is late", "all_reduces queued"
    samples = {
        "alone": [0.008, 0.008],
        f"{late} | push kernels": [0.01, 0.01],
        f"{queued} | push kernels": [0.02, 0.02],
        f"{late} | NCCL": [0.016, 0.016],
        f"{queued} | NCCL": [0.008, 0.008],
    }
    slow = samples | {f"{late} | push kernels": [0.0101, 0.0101]}

    report = overlap.report({"matmul": samples, "softmax": slow}, SETTINGS)

    ratios = ("0.80", "0.40", "0.50", "1.00")
    assert [row[-1] for row in report.rows[:4]] == [f"{one} ({one}..{one})" for one in ratios]
    assert report.rows[0][:5] == ("matmul", late, "push kernels", "8.00", "10.0")
    assert report.findings == (
        f"met: matmul, {late}: keeps 0.80, target at least 0.8; NCCL 0.50",
        f"missed: softmax, {late}: keeps 0.79, target at least 0.8; NCCL 0.50",
    )


def test_a_group_in_addition_to_the_rings_is_reported() -> None:
    report = memory.report(memory_runs(initialised=True), SETTINGS)

    assert "torch.distributed initialised: yes" in report.findings[0]


def test_import_report_tells_what_was_opened() -> None:
    one = {"whole": 0.5, "after": 0.1, "sockets": 0, "cuda": 0}
    runs = {"import torch": [one, one], "import torch, commlib": [one, one | {"sockets": 3}]}

    late, torch_alone, both = import_time.report(runs, {"rounds": 2}).findings

    assert late.startswith("missed: ") and "100 ms, target at most 60.0 ms" in late
    assert torch_alone == "import torch: 0 CUDA contexts, 0 sockets open"
    assert both == "import torch, commlib: 0 CUDA contexts, 3 sockets open"


def test_gloo_report_compares_like_with_like() -> None:
    times = dict(zip(GLOO, (1.0, 2.0, 9.0, 3.0, 2.0), strict=True))
    sizes = {"4 B": {name: [time] for name, time in times.items()}}

    in_place, fresh, backend = gloo.report(sizes, SETTINGS).findings

    assert in_place.startswith("met: 4 B, ops.all_reduce(x, out=x) / dist.all_reduce(x): 0.50")
    assert fresh.startswith("missed: 4 B, ops.all_reduce(x) / dist.all_reduce(x.clone()): 3.00")
    assert backend.startswith("met: 4 B, " + gloo.BACKEND + " / dist.all_reduce(x): 1.00")


# -- statistics and files ------------------------------------------------------------------------


def test_a_race_takes_turns_and_leaves_warm_rounds_out() -> None:
    order: list[str] = []
    settled: list[int] = []
    peers = {name: (lambda name=name: order.append(name)) for name in "abc"}

    samples = race(peers, rounds=4, calls=3, settle=lambda: settled.append(len(order)))

    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys("abc", 4)
    assert all(value >= 0 for values in samples.values() for value in values)
    assert len(order) == 3 * (WARM_ROUNDS + 4) * (1 + 3)
    assert settled[:4] == [1, 4, 5, 8]  # after the untimed call, and after the timed ones


def test_turns() -> None:
    orders = [turns("abc", number) for number in range(6)]

    assert ["".join(order) for order in orders] == ["abc", "cba", "bca", "acb", "cab", "bac"]


def test_a_ratio_is_of_medians_with_the_spread_of_rounds() -> None:
    assert spread([1.0, 2.0, 9.0]).middle == 2.0
    assert spread([5.0]) == (5.0, 5.0, 5.0)

    one = ratio([2.0, 4.0, 12.0], [1.0, 2.0, 3.0])

    assert one.middle == 2.0
    assert one.low == pytest.approx(2.0) and one.high == pytest.approx(3.6)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.00"), (1.234, "1.23"), (-45.67, "-45.7"), (1234.5, "1234")]
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_a_target_is_met_at_its_limit() -> None:
    assert target("x", 3.0, 3.0, " ms") == "met: x: 3.00 ms, target at most 3.00 ms"
    assert target("x", 3.003, 3.0) == "missed: x: 3.0030, target at most 3.0000"


def test_a_file_replaces_that_of_an_earlier_run(tmp_path: Path) -> None:
    report = Report("gloo", "What.", ("call", "a | b"), (("x", "1"),), ("met",), {"rounds": 1})

    names = [write(tmp_path / "new", report, FACTS, ranks).name for ranks in (2, 2, 4)]

    assert names == ["gloo-2cpu.md", "gloo-2cpu.md", "gloo-4cpu.md"]
    assert len(list((tmp_path / "new").iterdir())) == 2
    text = (tmp_path / "new" / names[1]).read_text()
    assert "| CPU | some \\| model |" in text and "| call | a \\| b |" in text
    assert "`commlib bench gloo --rounds 1`" in text


def test_a_target_for_gpus_is_not_missed_on_cpus() -> None:
    finding = target("x", 3.0, 2.0, " ms", measurable=False)

    assert finding == "not measured here, needs GPUs: x: 3.00 ms, target at most 2.00 ms"


def test_a_narrow_terminal_cuts_nothing_off() -> None:
    calls = ("ops.all_reduce(x, out=x)", "ops.all_reduce(x, out=x, use_calc_stream=False)")
    samples = {name: [0.5, 12345.678] for name in calls}
    columns = timing_columns("µs", calls, "kind", "size")
    rows = tuple(timing_rows(samples, calls, 1e6, "graph", "512 KiB"))
    shown = io.StringIO()

    show(Console(file=shown, width=80), Report("x", "", columns, rows, (), {}))

    text = shown.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    cells = "".join(cell for row in (columns, *rows) for cell in row).replace(" ", "")
    assert not Counter(cells) - Counter(text)
