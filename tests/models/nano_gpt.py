"""A trainer like nanoGPT's: micro steps, clipping, schedules and mixed precision."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.program import Program, Session, integers, trained

# -- a trainer like nanoGPT's ----------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention over several heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> Any:
        """Return the attended values."""
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, 2)
        )
        drop = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(rows, length, width)))


class Block(nn.Module):
    """Attention and a perceptron, both with a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        wide = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp = nn.Sequential(*wide, nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> Any:
        """Return the block's output."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A small language model with tied weights."""

    def __init__(self, vocabulary: int = 50, length: int = 16, width: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 2, 0.1) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> Any:
        """Return logits and loss."""
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.wte(idx) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def nano_gpt(part: str, device: torch.device) -> Session:
    """Train as nanoGPT does: micro steps, a cosine learning rate, clipping, AdamW.

    ``part``: what is captured: the model, the micro step, or the whole turn.
    """
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(_groups(model), lr=1e-3, betas=(0.9, 0.95))
    data = integers(1, 0, 50, 400, device=torch.device("cpu"))

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = integers(number, 0, 380, 3, device=torch.device("cpu"))
        x = torch.stack([data[i : i + 16] for i in starts])
        y = torch.stack([data[i + 1 : i + 17] for i in starts])
        return x.to(device), y.to(device)

    def micro(x: torch.Tensor, y: torch.Tensor, call: Any = model) -> torch.Tensor:
        _, loss = call(x, y)
        loss = loss / 2
        loss.backward()
        return loss.detach()

    def whole(batches: list[Any], run: Any = micro) -> list[torch.Tensor]:
        losses = [run(x, y).clone() for x, y in batches]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return losses

    def turn(step: Any, number: int) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 + 0.5 * (1 + math.cos(math.pi * number / 10)) * 1e-3
        batches = [batch(2 * number), batch(2 * number + 1)]
        if part == "whole turn":
            return step(batches)
        run = step if part == "micro step" else functools.partial(micro, call=step)
        return whole(batches, run)

    steps = {"model": model, "micro step": micro, "whole turn": whole}
    return Session(steps[part], turn, trained(model, optimizer))


def _programs() -> Iterator[Program]:
    for part in ("model", "micro step", "whole turn"):
        yield Program(f"nanoGPT/{part}", functools.partial(nano_gpt, part))


PROGRAMS = list(_programs())
