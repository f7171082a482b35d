"""Benchmark `quantized`: the linear layers of a decode step with weights of 8 bits."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import commlib
from commlib.ops.inference import QuantizedWeight, quantize
from commlib.ops.inference.quantized_linear import quantized_linear
from commlib.tools.bench.capture import walls
from commlib.tools.bench.capture_work import by_hand
from commlib.tools.bench.launch import launch
from commlib.tools.bench.machine import gpu_refusal
from commlib.tools.bench.pair import TIMEOUT
from commlib.tools.bench.report import Report, Row, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, ratio

ROUNDS = 20
BATCHES = 1, 8, 64
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
PLAIN, CONVERTED = "bfloat16", "int8, converted to bfloat16 in each call"
GOALS = {  # by batch: the peer, and the most of its time
    1: (PLAIN, {"int8": 0.75, "fp8": 0.9}),
    8: (PLAIN, {"int8": 0.75, "fp8": 0.9}),
    64: (CONVERTED, {"int8": 1.0, "fp8": 1.0}),
}
SHAPES = (5120, 8192), (8192, 4096), (28672, 8192), (8192, 14336)  # outputs, inputs
NEAR = 0.02  # of the largest result
CAPTION = (
    "The four linear layers of one layer of Llama 70B on one of two ranks (outputs x inputs "
    f"{', '.join(f'{o} x {i}' for o, i in SHAPES)}), bfloat16 activations, in a CUDA graph, on "
    "{nproc} GPUs, one a rank, every peer in the same processes: int8 and float8_e4m3fn weights "
    "with a scale per output, read as they are by one kernel each; int8 weights converted before "
    "each product; bfloat16 weights. Wall time by CUDA events, on the slowest rank."
)


def refusal(nproc: int) -> str | None:
    """Say what is missing here; one rank is enough."""
    return gpu_refusal(nproc, least=1)


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` GPUs, one a rank."""
    return report(launch("quantized", nproc, rounds=rounds), {"nproc": nproc, "rounds": rounds})


def report(samples: Mapping[str, Samples], settings: dict[str, int]) -> Report:
    """Turn the samples of each batch into a table and findings."""
    return Report(
        name="quantized",
        caption=CAPTION.format(**settings),
        columns=timing_columns("µs", (PLAIN,), "batch"),
        rows=tuple(_rows(samples)),
        findings=tuple(_findings(samples)),
        settings=settings,
    )


def _rows(samples: Mapping[str, Samples]) -> Iterator[Row]:
    for batch in BATCHES:
        yield from timing_rows(samples[str(batch)], (PLAIN,), 1e6, str(batch))


def _findings(samples: Mapping[str, Samples]) -> Iterator[str]:
    for batch, (base, limits) in GOALS.items():
        times = samples[str(batch)]
        for name, limit in limits.items():
            part = ratio(times[name], times[base]).middle
            yield target(f"batch {batch}, {name} / {base}", part, limit)


# -- on each rank ---------------------------------------------------------------------------------


def measure(rounds: int) -> dict[str, Any]:
    """Return, on each rank, the samples of each batch."""
    ring = commlib.init("nccl", timeout=TIMEOUT)  # makes this rank's GPU the current one
    layers = Layers(ring.device)
    samples = {}
    for batch in BATCHES:
        calls = layers.calls(batch)
        layers.check(calls)
        graphs = {name: by_hand(call).replay for name, call in calls.items()}
        samples[str(batch)] = walls(ring, graphs, rounds)
    commlib.shutdown()
    return samples


class Layers:
    """The weights of a layer in each form, from one draw."""

    def __init__(self, device: torch.device) -> None:
        """Draw them on ``device``."""
        draw = torch.Generator(device).manual_seed(0)
        self._draw, self._device = draw, device
        self._plain: list[torch.Tensor] = []
        self._quantized: dict[str, list[QuantizedWeight]] = {name: [] for name in DTYPES}
        for shape in SHAPES:
            weight = torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16)
            self._plain.append(weight)
            for name, dtype in DTYPES.items():
                self._quantized[name].append(quantize(weight, dtype))

    def calls(self, batch: int) -> dict[str, Callable[[], list[torch.Tensor]]]:
        """Return the layers of each form as calls without arguments."""
        inputs = [
            torch.randn(
                (batch, width), generator=self._draw, device=self._device, dtype=torch.bfloat16
            )
            for _, width in SHAPES
        ]
        return {
            **{name: partial(_kernels, inputs, self._quantized[name]) for name in DTYPES},
            CONVERTED: partial(_converted, inputs, self._quantized["int8"]),
            PLAIN: partial(_products, inputs, self._plain),
        }

    def check(self, calls: Mapping[str, Callable[[], list[torch.Tensor]]]) -> None:
        """Raise where the kernels' results are not those of the converted weights."""
        for actual, expected in zip(calls["int8"](), calls[CONVERTED](), strict=True):
            largest = float((actual - expected).abs().max() / expected.abs().max())
            if not largest <= NEAR:
                raise AssertionError(f"int8: results differ by {largest} of the largest")


def _kernels(inputs: list[torch.Tensor], weights: list[QuantizedWeight]) -> list[torch.Tensor]:
    pairs = zip(inputs, weights, strict=True)
    return [quantized_linear(x, weight.values, weight.scales, None) for x, weight in pairs]


def _converted(inputs: list[torch.Tensor], weights: list[QuantizedWeight]) -> list[torch.Tensor]:
    pairs = zip(inputs, weights, strict=True)
    return [(F.linear(x, w.values.to(x.dtype)) * w.scales).to(x.dtype) for x, w in pairs]


def _products(inputs: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [F.linear(x, weight) for x, weight in zip(inputs, weights, strict=True)]
