"""examples/llm_decode.py, and the Llama that it runs, against transformers' own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from commlib.errors import ArgumentError
from commlib.ops.inference import ContiguousCache, Llama, llama_config
from examples import llm_decode
from tests.support.checks import Array, assert_equal, raises, wide
from tests.support.processes import run
from tests.support.ranks import NewRanks, Ranks

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
PROGRAM = "examples/llm_decode.py"
SEQUENCES, TOKENS, PROMPT, NEAR = 2, 24, 20, 2e-5
LONG_CONTEXT = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped heads, long context": {"num_key_value_heads": 2, "rope_parameters": LONG_CONTEXT},
    "biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
}


def checkpoint(folder: Path, kind: str) -> tuple[Array, Array]:
    """Save a tiny random Llama; return tokens and the logits that transformers gives for them."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
        initializer_range=0.2,
        **MODELS[kind],
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data.add_(torch.randn_like(parameter) / 4)
    model.save_pretrained(folder)
    tokens = torch.randint(48, (SEQUENCES, TOKENS))
    with torch.no_grad():
        return wide(tokens), wide(model(input_ids=tokens).logits)


def as_transformers(ring: Any, folder: Path, given: Array, expected: Array) -> None:
    """A prompt, and decode steps after it, give the logits of transformers."""
    model = Llama.load(ring, folder, dtype=torch.float32)
    cache = ContiguousCache.zeros(
        model.config,
        layers=len(model.layers),
        sequences=SEQUENCES,
        capacity=TOKENS,
        ranks=ring.size,
        dtype=torch.float32,
        device=ring.device,
    )
    tokens, rotary = torch.from_numpy(given).to(ring.device), model.rotary(TOKENS)
    spans = [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, TOKENS))]
    parts = [
        model.logits(model.activations(tokens[:, first:end], cache, first, rotary))
        for first, end in spans
    ]
    apart = float(np.abs(wide(torch.cat(parts, 1)) - expected).max() / np.abs(expected).max())
    assert_equal(apart <= NEAR, True, f"{apart} of the largest logit apart")


@pytest.mark.parametrize("kind", MODELS)
def test_logits_of_transformers(kind: str, tmp_path: Path, unified_ranks: Ranks) -> None:
    unified_ranks(as_transformers, tmp_path, *checkpoint(tmp_path, kind))


def test_logits_of_transformers_on_four_ranks(tmp_path: Path, new_ranks: NewRanks) -> None:
    """More ranks than key heads."""
    saved = checkpoint(tmp_path, "grouped heads, long context")
    with new_ranks(4) as ranks:
        ranks(as_transformers, tmp_path, *saved)


def refusals(ring: Any, folder: Path) -> None:
    tiny, layers, _ = llm_decode.MODELS["tiny"]
    with raises(ArgumentError, f"rank {ring.rank}", "vocabulary=63 on 2 ranks"):
        Llama.random(ring, tiny, layers=layers, vocabulary=63, dtype=torch.float32)
    with raises(ArgumentError, "has no model.embed_tokens.weight; expected it in a file"):
        Llama.load(ring, folder, dtype=torch.float32)


def test_models_that_do_not_fit(tmp_path: Path, ranks: Ranks) -> None:
    checkpoint(tmp_path, "plain")
    (tmp_path / "model.safetensors").unlink()
    ranks(refusals, tmp_path)
    with pytest.raises(ArgumentError, match="model_type='gpt2'; expected 'llama'"):
        llama_config({"model_type": "gpt2"})


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"ranks": 2}, None),
        ({"ranks": 2, "tokens": [[2]]}, "other tokens or logits on as many ranks"),
        ({"ranks": 1, "tokens": [[2]], "logits": ["0x1.0p+0", "0x1.01p+2"]}, None),
        ({"ranks": 1, "logits": ["0x1.0p+0", "0x1.1p+2"]}, "logits differ by 5.9e-02"),
    ],
)
def test_compare(theirs: dict[str, Any], said: str | None, tmp_path: Path) -> None:
    ours = {"ranks": 2, "tokens": [[1]], "logits": ["0x1.0p+0", "0x1.0p+2"]}
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(ours | theirs))
    message = llm_decode.compare(ours, path, 1e-2)
    assert message == said if said is None else said in str(message)


def decoded(*options: str, ranks: int, flag: str) -> None:
    launcher = (*LAUNCHER, "--nproc-per-node", str(ranks)) if ranks > 1 else ()
    arguments = (*launcher, PROGRAM, "--steps", "5", "--batch", "3", *options)
    code, out, err = run(*arguments, seconds=240, FLAGS_dynamic_static_unified_comm=flag)
    assert code == 0, out + err
    assert "the same tokens eager and captured" in out
    assert out.count("tokens/s") == 2 and "reductions alone: " in out
    assert "captured" in err and "100%" in err  # the progress bar
    assert "Warning" not in err


def test_the_program(tmp_path: Path) -> None:
    """One rank, and two with both engines: the same bits on two, the same but rounding on one."""
    one, two = str(tmp_path / "one.json"), str(tmp_path / "two.json")
    decoded("--json", one, ranks=1, flag="1")
    decoded("--json", two, "--against", one, ranks=2, flag="1")
    decoded("--against", two, ranks=2, flag="0")
    tokens = json.loads(Path(two).read_text())["tokens"]
    assert len(tokens) == 3 and {len(row) for row in tokens} == {6}


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_the_program_with_a_checkpoint(dtype: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, "plain")
    decoded("--checkpoint", str(tmp_path), "--quantize", dtype, ranks=1, flag="1")


def test_options_that_do_not_fit() -> None:
    said = "--batch 65: expected 1 to 64\n"
    assert run(PROGRAM, "--batch", "65") == (2, "", said)
