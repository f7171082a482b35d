"""Decode tokens with a Llama that is split over all ranks, eagerly and from CUDA graphs.

The model has random weights from a seed, in the shape of Llama 3 8B or 70B or a tiny one. Or it
is read from a local Hugging Face folder. Nothing is downloaded:

    torchrun --standalone --nproc-per-node 2 examples/llm_decode.py --model 8b --json two.json
    python examples/llm_decode.py --model 8b --against two.json
    torchrun --standalone --nproc-per-node 2 examples/llm_decode.py --checkpoint FOLDER

The ranks must divide heads and vocabulary. A batch is padded to the next of BUCKETS, and each
bucket has one graph. Exit code 1 if captured steps give other tokens than eager ones, or if
--against differs: in any bit on as many ranks, by more than rounding on others. The time of
communication is that of the reductions alone, each with its residual and norm.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import commlib
from commlib import CommContext, graph, ops
from commlib.ops.inference import ContiguousCache, DecoderConfig, Llama, llama_config

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
LLAMA_8B = DecoderConfig(4096, heads=32, kv_heads=8, head_dim=128, inner=14336, eps=1e-5)
LLAMA_70B = DecoderConfig(8192, heads=64, kv_heads=8, head_dim=128, inner=28672, eps=1e-5)
TINY = DecoderConfig(64, heads=4, kv_heads=2, head_dim=16, inner=96, eps=1e-5)
MODELS = {"tiny": (TINY, 2, 64), "8b": (LLAMA_8B, 32, 128_256), "70b": (LLAMA_70B, 80, 128_256)}
SEED = 1
QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest


class Session:
    """A model with a cache, and the tokens and positions of its sequences."""

    def __init__(self, model: Llama, sequences: int, capacity: int) -> None:
        self.model, device = model, model.ring.device
        self.cache = ContiguousCache.zeros(
            model.config,
            layers=len(model.layers),
            sequences=sequences,
            capacity=capacity,
            ranks=model.ring.size,
            dtype=model.embedding.dtype,
            device=device,
        )
        self.rotary = model.rotary(capacity)
        self.tokens, self.positions = torch.zeros(2, sequences, dtype=torch.long, device=device)

    def begin(self, prompts: Tensor) -> Tensor:
        """Run whole prompts [B, S]; return the logits after them [B, vocabulary]."""
        y = self.model.activations(prompts, self.cache, 0, self.rotary)
        logits = self.model.logits(y[:, -1])
        self.tokens.zero_()[: len(prompts)] = logits.argmax(-1)
        self.positions.fill_(prompts.shape[1])
        return logits

    def step(self, bucket: int) -> None:
        """Replace the first ``bucket`` tokens by those that follow them."""
        tokens, positions = self.tokens[:bucket], self.positions[:bucket]
        y = self.model.activations(
            tokens[:, None], self.cache, positions, self.rotary, check_positions=False
        )
        tokens.copy_(self.model.logits(y[:, -1]).argmax(-1))
        positions.add_(1)


# -- runs -----------------------------------------------------------------------------------------


def settle(ring: CommContext) -> None:
    """Wait for a GPU."""
    if ring.device.type == "cuda":
        torch.cuda.synchronize(ring.device)


def seconds(ring: CommContext, call: Callable[[], object], times: int) -> float:
    """Return the seconds of one of several calls in a row."""
    settle(ring)
    began = time.perf_counter()
    for _ in range(times):
        call()
    settle(ring)
    return (time.perf_counter() - began) / times


@torch.no_grad()
def generate(
    session: Session, prompts: Tensor, steps: Iterable[int], step: Callable[[int], object]
) -> tuple[Tensor, Tensor, float]:
    """Return tokens [B, steps + 1], the logits after the prompts, and the seconds of a step."""
    count = len(prompts)
    bucket = next(size for size in BUCKETS if size >= count)
    logits = session.begin(prompts)
    tokens = [session.tokens[:count].clone()]
    settle(session.model.ring)
    began = time.perf_counter()
    for _ in steps:
        step(bucket)
        tokens.append(session.tokens[:count].clone())
    settle(session.model.ring)
    return torch.stack(tokens, 1), logits, (time.perf_counter() - began) / (len(tokens) - 1)


@torch.no_grad()
def reductions(model: Llama, bucket: int, steps: int) -> float:
    """Return the seconds of the reductions of one step alone, captured."""
    x = torch.ones(bucket, 1, model.config.hidden, device=model.ring.device).to(model.final_norm)

    def reduce() -> None:
        y = x
        for _ in range(2 * len(model.layers)):
            y, _ = ops.all_reduce_residual_norm(y, x, model.final_norm, model.ring)

    captured = graph.capture(reduce, verify=False)
    captured()
    elapsed = seconds(model.ring, captured, steps)
    captured.reset()
    return elapsed


def compare(ours: dict[str, Any], path: Path, tolerance: float) -> str | None:
    """Return how the result of another run differs; None if it does not."""
    theirs = json.loads(path.read_text())
    if ours["ranks"] == theirs["ranks"]:
        return None if ours == theirs else f"{path}: other tokens or logits on as many ranks"
    one, other = (torch.tensor([float.fromhex(x) for x in r["logits"]]) for r in (ours, theirs))
    apart = float((one - other).abs().max() / other.abs().max())
    return None if apart <= tolerance else f"{path}: logits differ by {apart:.1e} of the largest"


def main() -> int:
    """Decode and print the figures on rank 0; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="tiny", help="shape (tiny)")
    parser.add_argument("--checkpoint", type=Path, help="folder of a Hugging Face Llama")
    parser.add_argument("--quantize", choices=QUANTIZED, help="8-bit weights")
    parser.add_argument("--batch", type=int, default=2, help="sequences (2)")
    parser.add_argument("--prompt", type=int, default=8, help="tokens of a prompt (8)")
    parser.add_argument("--steps", type=int, default=16, help="steps of decoding (16)")
    parser.add_argument("--json", type=Path, help="file for tokens and logits")
    parser.add_argument("--against", type=Path, help="file of another run to compare with")
    options = parser.parse_args()
    for name, most in (("batch", BUCKETS[-1]), ("prompt", math.inf), ("steps", math.inf)):
        value = getattr(options, name)
        if not 1 <= value <= most:
            expected = "1 or more" if most == math.inf else f"1 to {most}"
            parser.exit(2, f"--{name} {value}: expected {expected}\n")
    ring = commlib.init()
    shape = MODELS[options.model][0]
    if options.checkpoint:
        shape = llama_config(json.loads((options.checkpoint / "config.json").read_text()))
    fault = shape.fault(ring.size)
    if fault:
        parser.exit(2, f"{fault}\n")
    code = decode(ring, options)
    commlib.shutdown()
    return code


def model_of(
    ring: CommContext, options: argparse.Namespace, dtype: torch.dtype, track: Any
) -> Llama:
    """Return this rank's part of the model that the options name."""
    if options.checkpoint:
        model = Llama.load(ring, options.checkpoint, dtype=dtype, track=track)
    else:
        config, layers, vocabulary = MODELS[options.model]
        sizes = {"layers": layers, "vocabulary": vocabulary, "seed": SEED}
        model = Llama.random(ring, config, **sizes, dtype=dtype, track=track)
    return model.quantize(QUANTIZED[options.quantize]) if options.quantize else model


def decode(ring: CommContext, options: argparse.Namespace) -> int:
    """Run the session eagerly and captured."""
    dtype = torch.bfloat16 if ring.device.type == "cuda" else torch.float32
    with Progress(console=Console(stderr=True), disable=ring.rank != 0) as progress:
        model = model_of(ring, options, dtype, partial(progress.track, description="layers"))
        bucket = next(size for size in BUCKETS if size >= options.batch)
        session = Session(model, bucket, options.prompt + options.steps + 1)
        draw = torch.Generator().manual_seed(SEED)
        vocabulary = len(model.embedding)
        prompts = torch.randint(vocabulary, (options.batch, options.prompt), generator=draw)
        prompts = prompts.to(ring.device)
        captured = graph.capture(session.step, verify=False)
        ways = {"warm-up": session.step, "eager": session.step}
        results = {}
        for name, step in (ways | {"capture": captured, "captured": captured}).items():
            steps = progress.track(range(options.steps), description=name)
            results[name] = generate(session, prompts, steps, step)
        alone = reductions(model, bucket, options.steps)
    captured.reset()
    return report(ring, options, results, alone, TOLERANCES[dtype])


def report(
    ring: CommContext,
    options: argparse.Namespace,
    found: dict[str, tuple[Tensor, Tensor, float]],
    alone: float,
    tolerance: float,
) -> int:
    """Print the figures, write and compare the result; return the exit code."""
    tokens, logits, _ = found["captured"]
    equal = all(torch.equal(tokens, other) for other, _, _ in found.values())
    said = None if equal else "captured steps gave other tokens than eager ones"
    result = {
        "ranks": ring.size,
        "tokens": tokens.tolist(),
        "logits": [value.hex() for value in logits[0].float().tolist()],
    }
    if options.against and said is None:
        said = compare(result, options.against, tolerance)
    if ring.rank == 0:
        if options.json:
            options.json.write_text(json.dumps(result))
        for name in ("eager", "captured"):
            print(f"{name:9} {options.batch / found[name][2]:10.1f} tokens/s")
        step = found["captured"][2]
        print(f"reductions alone: {alone * 1e3:.3f} ms, {alone / step:.0%} of a captured step")
        print(said or "the same tokens eager and captured")
    return int(said is not None)


if __name__ == "__main__":
    sys.exit(main())
