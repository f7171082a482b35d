"""examples/fleet_gpt.py: the same losses on both engines; the model is the one that it splits."""

import math
from typing import Any

import torch
import torch.nn.functional as F

from examples import fleet_gpt
from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.paddle_groups import own_groups
from tests.support.ports import free_port
from tests.support.processes import run, start
from tests.support.runs_on import runs_on

PROGRAM = ("examples/fleet_gpt.py", "--steps", "3")
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
Weights = dict[str, torch.Tensor]


def gathered(ring: Any, model: fleet_gpt.GPT) -> Weights:
    """Return the whole weights."""
    full = {}
    for name, part in model.named_parameters():
        every = torch.empty((ring.size, *part.shape), device=ring.device)
        ring.all_gather(every, part.detach())
        axis = getattr(part, "split_axis", None)
        full[name] = every[0] if axis is None else torch.cat(every.unbind(0), axis)
    return full


def reference(w: Weights, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of the whole model: pre-norm blocks, heads of q, k and v side by side."""
    (batch, length), width, heads = ids.shape, fleet_gpt.WIDTH, fleet_gpt.HEADS

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (width,), w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["words.weight"][ids] + w["positions.weight"]
    for block in (f"blocks.{number}" for number in range(fleet_gpt.BLOCKS)):
        mixed = linear(norm(x, f"{block}.norm_attention"), f"{block}.attention.qkv")
        q, k, v = mixed.view(batch, length, heads, 3, -1).permute(3, 0, 2, 1, 4)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(width // heads)
        past = torch.ones(length, length, device=x.device).tril().bool()
        seen = scores.where(past, -torch.inf).softmax(-1) @ v
        x = x + linear(seen.transpose(1, 2).flatten(2), f"{block}.attention.projection")
        hidden = F.gelu(linear(norm(x, f"{block}.norm_mlp"), f"{block}.up"))
        x = x + linear(hidden, f"{block}.down")
    return norm(x, "norm") @ w["words.weight"].t()


@runs_on("ranks")
def test_the_model(ring: Any) -> None:
    with own_groups():
        fleet_gpt.start(mp_degree=2)
        model = fleet_gpt.GPT().to(ring.device).eval()
        (text,) = fleet_gpt.batches(1, 0, ring.device)
        with torch.no_grad():
            logits, want = model(text[:, :-1]), reference(gathered(ring, model), text[:, :-1])
        shard = want.chunk(2, -1)[ring.rank].contiguous()
        assert_bits_equal(logits, shard, "logits", atol=1e-4)
        again = fleet_gpt.train(4)
        assert_equal(again[-1] < again[0], True, f"the loss falls: {again}")


def under_paddle(flag: str) -> tuple[int, str, str]:
    """Run the program on two ranks with the variables of Paddle's launcher."""
    endpoints = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    ranks = [
        start(
            *PROGRAM,
            FLAGS_dynamic_static_unified_comm=flag,
            CUDA_VISIBLE_DEVICES="",
            PADDLE_TRAINER_ID=str(rank),
            PADDLE_TRAINERS_NUM="2",
            PADDLE_TRAINER_ENDPOINTS=endpoints,
        )
        for rank in range(2)
    ]
    try:
        (out, err), other = (process.communicate(timeout=60) for process in ranks)
    finally:
        for process in ranks:
            process.kill()
    return max(process.returncode for process in ranks), out, err + other[1]


def test_both_engines_give_the_same_losses() -> None:
    """Bit by bit: through torchrun as its first lines say, and with Paddle's variables."""
    torchrun = (*LAUNCHER, "--nproc-per-node", "2", *PROGRAM)
    runs = {
        "c10d": run(*torchrun, FLAGS_dynamic_static_unified_comm="0", CUDA_VISIBLE_DEVICES=""),
        "gloo": under_paddle("1"),
    }
    lines = {}
    for engine, (code, out, err) in runs.items():
        assert code == 0 and "Warning" not in err, err
        first, *lines[engine] = out.splitlines()
        assert first == f"2 ranks on {engine}, mp_degree 2"
        assert len(lines[engine]) == 3
    assert lines["c10d"] == lines["gloo"]


def test_wrong_numbers() -> None:
    said = "--steps 0: expected 1 or more\n"
    assert run("examples/fleet_gpt.py", "--steps", "0") == (2, "", said)
    said = "--mp 2: expected a divisor of 4 heads and 1 ranks\n"
    assert run("examples/fleet_gpt.py", "--mp", "2") == (2, "", said)
