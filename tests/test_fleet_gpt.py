"""examples/fleet_gpt.py: the same losses on both engines; the model is the one that it splits."""

import math
from typing import Any

import torch
import torch.nn.functional as F

from examples import fleet_gpt
from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.paddle_groups import own_groups
from tests.support.processes import run
from tests.support.runs_on import runs_on

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
PROGRAM = (*LAUNCHER, "--nproc-per-node", "2", "examples/fleet_gpt.py", "--steps", "3")
Weights = dict[str, torch.Tensor]


def gathered(ring: Any, model: fleet_gpt.GPT) -> Weights:
    """Return the whole weights."""
    whole = {}
    for name, part in model.named_parameters():
        every = torch.empty((ring.size, *part.shape), device=ring.device)
        ring.all_gather(every, part.detach())
        axis = getattr(part, "split_axis", None)
        whole[name] = every[0] if axis is None else torch.cat(every.unbind(0), axis)
    return whole


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
        own = want.chunk(2, -1)[ring.rank].contiguous()
        assert_bits_equal(logits, own, "logits", atol=1e-4)
        again = fleet_gpt.train(4)
        assert_equal(again[-1] < again[0], True, f"the loss falls: {again}")


def test_both_engines_give_the_same_losses() -> None:
    """As its first lines say, through the launcher: bit by bit."""
    lines = {}
    for flag, engine in (("0", "c10d"), ("1", "gloo")):
        code, out, err = run(
            *PROGRAM, FLAGS_dynamic_static_unified_comm=flag, CUDA_VISIBLE_DEVICES=""
        )
        assert code == 0, err
        first, *lines[flag] = out.splitlines()
        assert first == f"2 ranks on {engine}, mp_degree 2"
        assert len(lines[flag]) == 3 and "Warning" not in err
    assert lines["0"] == lines["1"]


def test_wrong_numbers() -> None:
    said = "--steps 0: expected 1 or more\n"
    assert run("examples/fleet_gpt.py", "--steps", "0") == (2, "", said)
    said = "--mp 2: expected a divisor of 4 heads and 1 ranks\n"
    assert run("examples/fleet_gpt.py", "--mp", "2") == (2, "", said)
