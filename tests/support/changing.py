"""Programs that train a model and change, between steps, anything that a captured step uses."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from commlib import ops

Captured = Callable[[Callable[..., Any]], Callable[..., Any]]
Seen = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Program:
    """A loop of training steps: what is captured, the optimizer, and the changes before a step."""

    part: str
    optimizer: str
    changes: tuple[tuple[str, ...], ...]
    verify: bool | str = "auto"


class Model(nn.Module):
    """Two layers with a buffer and a sum over the ring between them."""

    def __init__(self, ring: Any) -> None:
        super().__init__()
        self.ring = ring
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(3))
        self.slope = 1.0
        self.shift = torch.zeros(3, device=ring.device)  # neither a parameter nor a buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one value for each row."""
        y = torch.tanh(self.first(x) + self.shift) * self.scale
        if self.training:
            y = y * 0.75
        rows: torch.Tensor = self.second(ops.all_reduce(y, self.ring)).sum(1)
        return rows * self.slope


class Trainer:
    """A model with its optimizer, and what the program keeps of what it replaced."""

    def __init__(self, ring: Any, optimizer: str) -> None:
        torch.manual_seed(1 + ring.rank)
        self.model = Model(ring).to(ring.device)
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()), ring.device)
        self.averages = [x.detach().clone() for x in self.model.parameters()]
        self.rows = 2
        self.hooks: list[Any] = []
        self.kept: list[Any] = []

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        rows: torch.Tensor = self.model(x)
        return rows.square().sum()

    def gradients(self, x: torch.Tensor) -> torch.Tensor:
        """Drop the gradients and compute new ones."""
        self.optimizer.zero_grad()
        loss = self.loss(x)
        loss.backward()
        return loss.detach()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """Train with one batch."""
        loss = self.gradients(x)
        self.optimizer.step()
        for average, parameter in zip(self.averages, self.model.parameters(), strict=True):
            average.data.lerp_(parameter.data, 0.5)
        return loss

    def seen(self, loss: torch.Tensor) -> Seen:
        """Return copies of all that a program can read after a step."""
        snapshot: Seen = {"loss": loss.detach().clone()}
        snapshot |= {f"average {at}": x.clone() for at, x in enumerate(self.averages)}
        for name, parameter in self.model.named_parameters():
            snapshot[name] = parameter.detach().clone()
            grad = parameter.grad
            snapshot[f"gradient of {name}"] = None if grad is None else grad.clone()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                snapshot[f"{key} of {name}"] = value.clone() if torch.is_tensor(value) else value
        return snapshot


def steps(program: Program, ring: Any, captured: Captured) -> Iterator[Seen]:
    """Run a program and yield what it sees after each step.

    Args:
        program: What runs.
        ring: The ring of the model.
        captured: ``graph.capture``, or what leaves a function as it is.
    """
    trainer = Trainer(ring, program.optimizer)
    step = PARTS[program.part](trainer, captured)
    for turn, names in enumerate(program.changes):
        for name in names:
            CHANGES[name](trainer)
        x = torch.arange(3.0 * trainer.rows, device=ring.device).view(-1, 3).sin() + 0.1 * turn
        yield trainer.seen(step(x))


# -- what is captured -----------------------------------------------------------------------------


def _optimizer(trainer: Trainer, captured: Captured) -> Callable[..., torch.Tensor]:
    update = captured(trainer.optimizer.step)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = trainer.gradients(x)
        update()
        return loss

    return step


def _loss(trainer: Trainer, captured: Captured) -> Callable[..., torch.Tensor]:
    loss_of = captured(trainer.loss)

    def step(x: torch.Tensor) -> torch.Tensor:
        trainer.optimizer.zero_grad()
        loss: torch.Tensor = loss_of(x)
        loss.backward()
        trainer.optimizer.step()
        return loss

    return step


def _gradients(trainer: Trainer, captured: Captured) -> Callable[..., torch.Tensor]:
    gradients = captured(trainer.gradients)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = gradients(x)
        trainer.optimizer.step()
        return loss

    return step


PARTS: dict[str, Callable[[Trainer, Captured], Callable[..., torch.Tensor]]] = {
    "step": lambda trainer, captured: captured(trainer.step),
    "gradients": _gradients,
    "loss": _loss,
    "optimizer": _optimizer,
}

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], torch.device], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, device: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters, device: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "nesterov": lambda parameters, device: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda parameters, device: torch.optim.Adam(
        parameters, lr=torch.tensor(0.1, device=device), amsgrad=True, fused=True
    ),
    "adamw": lambda parameters, device: torch.optim.AdamW(
        parameters, lr=0.1, weight_decay=0.1, fused=True
    ),
    "two groups": lambda parameters, device: torch.optim.SGD(
        [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:], "momentum": 0.9}],
        lr=0.1,
    ),
}


# -- what is changed between steps ----------------------------------------------------------------


def _trains(trainer: Trainer, *, layer: str, yes: bool) -> None:
    trainer.model.get_submodule(layer).requires_grad_(yes)


def _replace_parameter(trainer: Trainer, *, tell: bool) -> None:
    """Bind another parameter in the model; the optimizer may learn of it, or train the old one."""
    old = trainer.model.first.weight
    trainer.model.first.weight = new = nn.Parameter(old.detach() * 0.5)
    trainer.kept.append(old)
    if tell:
        for group in trainer.optimizer.param_groups:
            group["params"] = [new if x is old else x for x in group["params"]]
        trainer.optimizer.state.pop(old, None)


def _replace_layer(trainer: Trainer) -> None:
    trainer.model.second = layer = nn.Linear(3, 2).to(trainer.model.scale.device)
    with torch.no_grad():
        layer.weight.fill_(0.2)
        layer.bias.fill_(0.1)
    trainer.optimizer.add_param_group({"params": list(layer.parameters())})


def _set_data(trainer: Trainer) -> None:
    trainer.model.second.weight.data = trainer.model.second.weight.detach() * 0.5


def _transpose(trainer: Trainer) -> None:
    trainer.model.first.weight.data = trainer.model.first.weight.data.t()


def _other_average(trainer: Trainer) -> None:
    trainer.kept.append(trainer.averages[0])
    trainer.averages[0] = torch.zeros_like(trainer.averages[0])


def _other_average_data(trainer: Trainer) -> None:
    trainer.averages[1].data = torch.zeros_like(trainer.averages[1])


def _other_moments_data(trainer: Trainer) -> None:
    for held in trainer.optimizer.state.values():
        for key in ("momentum_buffer", "exp_avg"):
            if torch.is_tensor(held.get(key)):
                held[key].data = held[key] * 0.5


def _write(trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.model.second.bias.fill_(0.3)


def _group(key: str, factor: float) -> Callable[[Trainer], None]:
    def change(trainer: Trainer) -> None:
        group = trainer.optimizer.param_groups[0]
        if key in group:
            group[key] = group[key] * factor if group[key] else 0.01

    return change


def _moments(value: Callable[[torch.Tensor], Any]) -> Callable[[Trainer], None]:
    """Bind other values in the states; the first and the third stay where the program can look."""

    def change(trainer: Trainer) -> None:
        for at, held in enumerate(trainer.optimizer.state.values()):
            for key in ("momentum_buffer", "exp_avg"):
                if torch.is_tensor(held.get(key)):
                    trainer.kept += [held[key]] if at % 2 else []
                    held[key] = value(held[key])

    return change


def _other_states(trainer: Trainer) -> None:
    trainer.kept.append(trainer.optimizer.state)
    trainer.optimizer.state = defaultdict(dict)


def _load(trainer: Trainer) -> None:
    state = copy.deepcopy(trainer.optimizer.state_dict())
    for held in state["state"].values():
        for value in held.values():
            if torch.is_tensor(value):
                value.mul_(0.5)
    trainer.optimizer.load_state_dict(state)


def _add_hook(trainer: Trainer) -> None:
    layer = trainer.model.first
    trainer.hooks.append(layer.register_forward_hook(lambda module, args, result: result * 2))


def _add_gradient_hook(trainer: Trainer) -> None:
    trainer.hooks.append(trainer.model.second.weight.register_hook(lambda gradient: gradient * 2))


def _remove_hook(trainer: Trainer) -> None:
    if trainer.hooks:
        trainer.hooks.pop().remove()


def _other_buffer(trainer: Trainer) -> None:
    trainer.kept.append(trainer.model.scale)
    trainer.model.scale = trainer.model.scale * 0.5


def _other_attribute(trainer: Trainer) -> None:
    trainer.kept.append(trainer.model.shift)
    trainer.model.shift = trainer.model.shift + 0.1


def _set_gradient(trainer: Trainer) -> None:
    for parameter in trainer.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)


def _other_mode(trainer: Trainer) -> None:
    trainer.model.train(not trainer.model.training)


CHANGES: dict[str, Callable[[Trainer], None]] = {
    "freeze the first layer": lambda trainer: _trains(trainer, layer="first", yes=False),
    "train the first layer": lambda trainer: _trains(trainer, layer="first", yes=True),
    "freeze the second layer": lambda trainer: _trains(trainer, layer="second", yes=False),
    "train the second layer": lambda trainer: _trains(trainer, layer="second", yes=True),
    "another parameter": lambda trainer: _replace_parameter(trainer, tell=True),
    "another parameter in the model alone": lambda trainer: _replace_parameter(trainer, tell=False),
    "another layer": _replace_layer,
    "other data": _set_data,
    "transposed data": _transpose,
    "other data of moments": _other_moments_data,
    "another average": _other_average,
    "other data of an average": _other_average_data,
    "values in place": _write,
    "learning rate": _group("lr", 0.5),
    "momentum": _group("momentum", 0.5),
    "weight decay": _group("weight_decay", 2.0),
    "other moments": _moments(torch.zeros_like),
    "no moments": lambda trainer: trainer.optimizer.state.clear(),
    "moments in place": _moments(lambda moment: moment.mul_(0.5)),
    "another dict of states": _other_states,
    "states loaded": _load,
    "no gradients": lambda trainer: trainer.optimizer.zero_grad(),
    "gradients of zero": lambda trainer: trainer.optimizer.zero_grad(set_to_none=False),
    "other gradients": _set_gradient,
    "a hook": _add_hook,
    "a hook of a gradient": _add_gradient_hook,
    "one hook less": _remove_hook,
    "another buffer": _other_buffer,
    "another tensor of the model": _other_attribute,
    "a number": lambda trainer: setattr(trainer.model, "slope", trainer.model.slope * 0.5),
    "training or evaluation": _other_mode,
    "more rows": lambda trainer: setattr(trainer, "rows", 5 - trainer.rows),
}
