"""Programs of two ranks over the operators of commlib: tensor and data parallel."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

import commlib
from commlib import ops
from tests.models.program import Program, Session, Start, floats, integers, trained
from tests.models.small_models import perceptron, rows
from tests.models.transformers_models import TEXT, VOCABULARY, tiny

RANKS = 2


class Column(nn.Module):
    """A linear layer of which each rank has some outputs."""

    def __init__(self, whole: nn.Linear, ring: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(ring.size, 0)[ring.rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs."""
        return F.linear(ops.identity(x), self.weight)


class Row(nn.Module):
    """A linear layer of which each rank has some inputs; the sum is over the ranks."""

    def __init__(self, whole: nn.Linear, ring: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(ring.size, 1)[ring.rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return all outputs on every rank."""
        return ops.all_reduce(F.linear(x, self.weight), backward="identity")


def sharded_llama(ring: Any, device: torch.device) -> Any:
    """Return a Llama whose attention and perceptrons are split between the ranks."""
    model = tiny(transformers.LlamaForCausalLM, TEXT, {}).to(device)
    for layer in model.model.layers:
        attention, wide = layer.self_attn, layer.mlp
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(attention, name, Column(getattr(attention, name), ring))
        for name in ("gate_proj", "up_proj"):
            setattr(wide, name, Column(getattr(wide, name), ring))
        attention.o_proj = Row(attention.o_proj, ring)
        wide.down_proj = Row(wide.down_proj, ring)
    return model


def _ring(device: torch.device) -> Any:
    return commlib.init(device=device)


def sharded_eval(device: torch.device) -> Session:
    """Score text with the sharded model."""
    model = sharded_llama(_ring(device), device).eval()

    @torch.no_grad()
    def score(ids: torch.Tensor) -> Any:
        return model(input_ids=ids).logits

    return Session(score, lambda step, n: step(integers(n, 3, VOCABULARY, 2, 8, device=device)))


def sharded_train(whole: bool, device: torch.device) -> Session:
    """Train the sharded model; captured is the loss, or the whole turn."""
    model = sharded_llama(_ring(device), device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loss_of(ids: torch.Tensor) -> Any:
        return model(input_ids=ids, labels=ids).loss

    def train_step(ids: torch.Tensor, loss_of: Any = loss_of) -> Any:
        optimizer.zero_grad()
        loss = loss_of(ids)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def turn(step: Any, number: int) -> Any:
        ids = integers(number, 3, VOCABULARY, 2, 8, device=device)
        return step(ids) if whole else train_step(ids, step)

    return Session(train_step if whole else loss_of, turn, trained(model, optimizer))


def sharded_decode(device: torch.device) -> Session:
    """Decode with the sharded model over a static cache."""
    ring = _ring(device)
    model = sharded_llama(ring, device).eval()
    config = transformers.LlamaConfig(**model.config.to_dict())
    config.num_key_value_heads //= ring.size
    config.num_attention_heads //= ring.size
    cache = transformers.StaticCache(config=config, max_cache_len=12)

    @torch.no_grad()
    def next_of(tokens: torch.Tensor) -> torch.Tensor:
        output = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        return output.logits[:, -1:].argmax(-1)

    def turn(step: Any, number: int) -> torch.Tensor:
        cache.reset()
        tokens = next_of(integers(number, 3, VOCABULARY, 2, 5, device=device))
        outputs = [tokens]
        for _ in range(5):
            outputs.append(step(outputs[-1]).clone())
        return torch.cat(outputs, 1)

    return Session(next_of, turn)


def averaged_gradients(whole: bool, device: torch.device) -> Session:
    """Train replicas on other data for each rank; the gradients are averaged."""
    ring = _ring(device)
    model = perceptron(device)
    model[2] = nn.Identity()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_step(x: torch.Tensor, y: torch.Tensor, call: Any = model) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(call(x), y)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = ops.all_reduce(parameter.grad, op="avg")
        optimizer.step()
        return loss.detach()

    def turn(step: Any, number: int) -> torch.Tensor:
        x, y = rows(number + 100 * ring.rank, device)
        return step(x, y) if whole else train_step(x, y, step)

    return Session(train_step if whole else model, turn, trained(model, optimizer))


def sharded_classes(device: torch.device) -> Session:
    """Train a classifier whose classes are split between the ranks."""
    ring = _ring(device)
    weight = nn.Parameter(torch.randn(6, 8, device=device))
    head = nn.ParameterList([weight])
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        logits = ops.identity(x) @ weight.T
        loss = ops.softmax_with_cross_entropy(logits, y).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def turn(step: Any, number: int) -> torch.Tensor:
        x = floats(number, 4, 8, device=device)
        return step(x, integers(number, 0, 6 * ring.size, 4, device=device))

    return Session(train_step, turn, trained(head))


def _programs() -> Iterator[Program]:
    of = functools.partial
    starts: dict[str, tuple[Start, tuple[str, ...]]] = {
        "Llama TP=2/eval": (sharded_eval, ("transformers",)),
        "Llama TP=2/loss": (of(sharded_train, False), ("transformers",)),
        "Llama TP=2/whole turn": (of(sharded_train, True), ("transformers",)),
        "Llama TP=2/decode step": (sharded_decode, ("transformers",)),
        "replicas/model": (of(averaged_gradients, False), ()),
        "replicas/whole turn": (of(averaged_gradients, True), ()),
        "sharded classes/whole turn": (sharded_classes, ()),
    }
    for name, (start, needs) in starts.items():
        yield Program(f"two ranks/{name}", start, ranks=RANKS, needs=needs)


PROGRAMS = list(_programs())
