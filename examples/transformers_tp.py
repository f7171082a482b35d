"""A tensor-parallel program of Transformers that knows nothing of commlib, on rings.

A tiny Llama with random weights is loaded with ``tp_plan="auto"``. It scores a text, continues it,
and is trained. Nothing is downloaded. With one environment variable the groups that Transformers
makes are groups of rings, and the program prints the same digits:

    torchrun --standalone --nproc-per-node 2 examples/transformers_tp.py
    FLAGS_comm_torch_backend=1 torchrun --standalone --nproc-per-node 2 examples/transformers_tp.py

The variable needs an installed commlib: ``make setup``, or ``pip install -e .``.
"""

import argparse
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, WORDS, NEW_WORDS = 96, 8, 6
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def save(folder: str) -> None:
    """Save a Llama with random weights."""
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)


def load(folder: str) -> Any:
    """Return the saved Llama, split between the ranks."""
    return LlamaForCausalLM.from_pretrained(folder, tp_plan="auto")


def text(device: torch.device) -> torch.Tensor:
    """Return two sequences of random words, the same on every rank."""
    words = torch.Generator().manual_seed(2)
    return torch.randint(3, VOCABULARY, (2, WORDS), generator=words).to(device)


def train(model: Any, ids: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Return the losses of some steps."""
    # Some parameters are DTensors and some are not: no operator takes both, so one by one.
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def results(model: Any, steps: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return logits, continued sequences and losses."""
    ids = text(model.device)
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
    continued = model.generate(ids, max_new_tokens=NEW_WORDS, do_sample=False)
    return logits, continued, train(model.train(), ids, steps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    if steps < 1:
        print(f"--steps {steps}: expected 1 or more", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:  # one per rank
        save(folder)
        model = load(folder)
    logits, continued, losses = results(model, steps)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, backend {dist.get_backend()}", file=sys.stderr)
        print(f"sum of the logits {logits.double().sum().item()}")
        print(f"sequences {continued.tolist()}")
        print(f"losses {[loss.item() for loss in losses]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
