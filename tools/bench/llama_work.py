"""The work that `llama` measures: a Llama of transformers that decodes, goes back, and trains."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from commlib import CommContext, ops

LAYERS, HIDDEN, INNER, HEADS, KEY_HEADS = 8, 512, 1024, 8, 4
VOCABULARY, BATCH, LENGTH, CACHED = 512, 2, 64, 256
CHECKED = 3  # calls that are compared

Tensor = torch.Tensor


def llama(device: torch.device) -> Any:
    """Return the model with random weights, the same each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER},
        **{"num_hidden_layers": LAYERS, "num_attention_heads": HEADS},
        **{"num_key_value_heads": KEY_HEADS, "max_position_embeddings": CACHED},
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, torch.bfloat16)


class Column(nn.Module):
    """A linear layer of which each rank has some outputs."""

    def __init__(self, whole: nn.Linear, ring: CommContext) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(ring.size, 0)[ring.rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs."""
        return F.linear(x, self.weight)


class Row(nn.Module):
    """A linear layer of which each rank has some inputs; the result is the sum over the ranks."""

    def __init__(self, whole: nn.Linear, ring: CommContext) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(ring.size, 1)[ring.rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs."""
        total: Tensor = ops.all_reduce(F.linear(x, self.weight))
        return total


class Decoder:
    """The model, split over all ranks, and a static cache: one token a call."""

    def __init__(self, ring: CommContext) -> None:
        from transformers import LlamaConfig, StaticCache

        self.model = llama(ring.device).eval()
        for layer in self.model.model.layers:
            for part, split, join in (
                (layer.self_attn, ("q_proj", "k_proj", "v_proj"), "o_proj"),
                (layer.mlp, ("gate_proj", "up_proj"), "down_proj"),
            ):
                for name in split:
                    setattr(part, name, Column(getattr(part, name), ring))
                setattr(part, join, Row(getattr(part, join), ring))
        config = LlamaConfig(**self.model.config.to_dict())
        config.num_key_value_heads //= ring.size
        config.num_attention_heads //= ring.size
        self.cache = StaticCache(config=config, max_cache_len=CACHED)
        self.token = torch.full((1, 1), 5, device=ring.device)

    @torch.no_grad()
    def next(self) -> Tensor:
        """Return the next token."""
        outputs = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True)
        token: Tensor = outputs.logits[:, -1:].argmax(-1)
        return token

    def begin(self) -> None:
        """Forget what was decoded."""
        self.cache.reset()

    def after(self, call: Callable[[], object]) -> list[Tensor]:
        """Return what some calls from the start leave in the cache."""
        self.begin()
        for _ in range(CHECKED):
            call()
        return [x.clone() for layer in self.cache.layers for x in (layer.keys, layer.values)]


class Passes(nn.Module):
    """The model as a function of tokens, and a pass forward and back through it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.model = llama(device).train()
        self.tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), device=device)
        hidden = torch.full((LENGTH, LENGTH), float("-inf"), dtype=torch.bfloat16, device=device)
        self.mask = torch.triu(hidden, 1)[None, None]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what the model says of each next token."""
        logits: Tensor = self.model(tokens, attention_mask=self.mask, use_cache=False).logits
        return logits.float()

    def loss(self, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the loss through ``forward``, which is this module in some form."""
        said = forward(self.tokens)[:, :-1].reshape(-1, VOCABULARY)
        return F.cross_entropy(said, self.tokens[:, 1:].reshape(-1))

    def both(self, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Go forward and back."""
        self.zero_grad()
        loss = self.loss(forward)
        loss.backward()
        return loss.detach()

    def after(self, call: Callable[[], Tensor]) -> list[Tensor]:
        """Return the loss and the gradients of a call."""
        loss = call().clone()
        return [loss, *(x.grad.clone() for x in self.parameters() if x.grad is not None)]


class Training(Passes):
    """A whole training step: forward, backward, clip, AdamW."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        rate = torch.tensor(1e-4, device=device)
        self.optimizer = torch.optim.AdamW(self.parameters(), rate, fused=True, capturable=True)

    def step(self) -> Tensor:
        """Make a step and return its loss."""
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.loss(self)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()
