"""Benchmark `c10d-decode`: a Llama of transformers on the backend "commlib" and on a stock one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import commlib.compat.c10d  # noqa: F401  # registers the backend
from commlib import CommContext, graph
from commlib.tools.bench.c10d.groups import NAME, OURS, STOCK, stock_backend
from commlib.tools.bench.capture_work import Call, by_hand
from commlib.tools.bench.launch import launch
from commlib.tools.bench.pair import backend_for, ring_and_group, slowest_seconds
from commlib.tools.bench.report import Report, Row, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, interleave, ratio, turns
from commlib.tools.launch import LaunchError

ROUNDS = 2  # fresh processes of each backend
TURNS = 6  # per process
EAGER, CAPTURED = "eager", "captured"
LIMITS = {EAGER: 0.85, CAPTURED: 0.75}  # of the stock backend's time
CALLS, CALLS_ON_CPUS = 10, 1  # steps of a turn; CPUs are not measured
CHECKED = 16  # tokens that are compared
FIRST = 5  # the token that every sequence begins with
HEADS, KEY_HEADS = 32, 8
ON_GPUS = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336}
ON_CPUS = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512}
VOCABULARY, VOCABULARY_ON_CPUS = 32000, 128
CACHED = 128  # more than the steps of a turn, and than those that are compared
Tokens = list[int]
Run = dict[str, Any]  # of one process: samples and tokens of each way to call
CAPTION = (
    "Time of one decode step of one token on the slowest rank, {calls} in a row, flag on: a Llama "
    "of transformers, {layers} layers of hidden {hidden}, {dtype} random weights, static cache of "
    "{cached}, loaded with tp_plan='auto' on {nproc} ranks on {place}. Fresh processes have the "
    f"backend {NAME!r} or stock {{stock}}, and take turns; a value is one of {TURNS} turns in a "
    "process. captured: graph.capture with verify=False; on the stock backend "
    "torch.cuda.CUDAGraph by hand (eager on CPUs). With two ranks all four have the same tokens; "
    "with more, the calls of one backend have."
)


def refusal(nproc: int) -> str | None:
    """Say why the benchmark can't run here."""
    if nproc < 2 or KEY_HEADS % nproc:
        return f"{nproc} ranks: expected 2, 4 or 8, a divisor of {KEY_HEADS} heads; pass --nproc 2"
    for package in ("transformers", "accelerate"):  # tp_plan needs the second one
        if find_spec(package) is None:
            return f"{package} is not installed; run `pip install '/path/to/commlib[models]'`"
    return None


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` GPUs, one per rank, or a tiny model on CPUs where there are fewer."""
    backend = backend_for(nproc)
    groups = {OURS: NAME, STOCK: backend}
    runs: dict[str, list[Run]] = {name: [] for name in groups}
    for number in range(rounds):
        for name in turns([*groups], number):
            runs[name].append(launch("c10d.decode", nproc, backend=backend, group=groups[name]))
    check({name: [run["tokens"] for run in repeats] for name, repeats in runs.items()}, nproc)
    samples = {
        way: {
            name: [value for run in repeats for value in run["samples"][way]]
            for name, repeats in runs.items()
        }
        for way in LIMITS
    }
    return report(samples, {"nproc": nproc, "rounds": rounds}, backend)


def check(tokens: Mapping[str, Sequence[Mapping[str, Tokens]]], ranks: int) -> None:
    """Raise ``LaunchError`` where two ways decode other tokens.

    The order of a sum of more than two ranks is the backend's own, and so are its last bits.
    """
    for name, runs in tokens.items():
        expected = tokens[STOCK if ranks == 2 else name][0][EAGER]
        for run in runs:
            for way, actual in run.items():
                if actual != expected:
                    raise LaunchError(
                        f"c10d-decode: {way}, {name}: tokens {actual}, expected {expected}"
                    )


def report(samples: Mapping[str, Samples], settings: dict[str, int], backend: str) -> Report:
    """Turn the samples of each way to call into a table and findings."""
    on_gpus = backend == "nccl"
    sizes = ON_GPUS if on_gpus else ON_CPUS
    return Report(
        name="c10d-decode",
        caption=CAPTION.format(
            calls=CALLS if on_gpus else CALLS_ON_CPUS,
            cached=CACHED,
            layers=sizes["num_hidden_layers"],
            hidden=sizes["hidden_size"],
            dtype="bfloat16" if on_gpus else "float32",
            **stock_backend(backend),
            **settings,
        ),
        columns=timing_columns("ms", (STOCK,), "step"),
        rows=tuple(_rows(samples)),
        findings=tuple(
            target(
                f"{way}, {OURS} / {STOCK}",
                ratio(samples[way][OURS], samples[way][STOCK]).middle,
                limit,
                measurable=on_gpus,
            )
            for way, limit in LIMITS.items()
        ),
        settings=settings,
    )


def _rows(samples: Mapping[str, Samples]) -> Iterator[Row]:
    for way, times in samples.items():
        yield from timing_rows(times, (STOCK,), 1e3, way)


# -- on each rank ---------------------------------------------------------------------------------


def measure(backend: str, group: str) -> Run:
    """Return, on each rank, samples and tokens of eager and of captured steps.

    ``group`` is the backend of ``torch.distributed``. Each backend has its processes: to DTensor
    meshes of the same ranks are equal, and it would mix the groups of two models.
    """
    with ring_and_group(backend, group) as ring:
        return _measure(ring)


def _measure(ring: CommContext) -> Run:
    """Release model and graphs at the end, before the group is destroyed."""
    model = load(ring)
    chains = {way: Chain(model, ring.device) for way in LIMITS}
    for chain in chains.values():
        chain.step()  # makes the cache
    step = chains[CAPTURED].step
    captured: Call = step
    reset: Callable[[], object] = _nothing
    if dist.get_backend() == NAME:
        ours = graph.capture(step, verify=False, on_fail="raise")
        ours()
        captured, reset = ours, ours.reset
    elif ring.device.type == "cuda":
        bare = by_hand(step)
        captured, reset = bare.replay, bare.reset
    calls: dict[str, Call] = {EAGER: chains[EAGER].step, CAPTURED: captured}
    tokens = {way: chains[way].tokens(call) for way, call in calls.items()}
    meters = {way: partial(_seconds, ring, chains[way], call) for way, call in calls.items()}
    samples = interleave(meters, rounds=TURNS)
    reset()  # before the communicator that the graphs use is closed
    return {"samples": samples, "tokens": tokens}


def _nothing() -> None:
    """Release nothing."""


def _seconds(ring: CommContext, chain: "Chain", call: Call) -> float:
    """Return the seconds of one step of a sequence that begins again."""
    chain.begin()
    calls = CALLS if ring.device.type == "cuda" else CALLS_ON_CPUS
    return slowest_seconds(ring, call, calls)


def load(ring: CommContext) -> Any:
    """Return the model, split over the default group by transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    on_gpu = ring.device.type == "cuda"
    config = LlamaConfig(
        **(ON_GPUS if on_gpu else ON_CPUS),
        **{"vocab_size": VOCABULARY if on_gpu else VOCABULARY_ON_CPUS},
        **{"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS},
        **{"max_position_embeddings": CACHED},
    )
    model = LlamaForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict={},  # all weights are new
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        distributed_config=DistributedConfig(tp_plan="auto", tp_size=ring.size),
    )
    split = _draw(model.parameters(), ring)
    if len(split) < 7 * config.num_hidden_layers:
        raise AssertionError(f"{len(split)} weights are split, expected 7 per layer or more")
    return model.eval()


@torch.no_grad()
def _draw(weights: Iterator[torch.Tensor], ring: CommContext) -> Sequence[DTensor]:
    """Draw weights, the same for each model; return those that are split over the ranks."""
    split = []
    for number, weight in enumerate(weights):
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        position = 0
        if isinstance(weight, DTensor):
            split.append(weight)
            position = 1 + ring.rank
        if local.ndim == 1:
            local.fill_(1)  # of a norm
        else:
            seed = number * (1 + ring.size) + position
            draw = torch.Generator(local.device).manual_seed(seed)
            local.normal_(0, weight.shape[-1] ** -0.5, generator=draw)
    return split


class Chain:
    """A sequence of one model: each step reads the last token, and writes the next one."""

    def __init__(self, model: Any, device: torch.device) -> None:
        from transformers import StaticCache

        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=CACHED)
        self.token = torch.full((1, 1), FIRST, device=device)

    @torch.no_grad()
    def step(self) -> None:
        """Decode one token."""
        outputs = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True)
        self.token.copy_(outputs.logits[:, -1:].argmax(-1))

    def begin(self) -> None:
        """Forget what was decoded."""
        self.cache.reset()
        self.token.fill_(FIRST)

    def tokens(self, call: Callable[[], object]) -> Tokens:
        """Return the first tokens of a sequence."""
        self.begin()
        tokens = []
        for _ in range(CHECKED):
            call()
            tokens.append(int(self.token))
        return tokens
