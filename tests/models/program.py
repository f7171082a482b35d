"""`Program`: one real program as its user writes it, and how its results are read."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

SEED = 20
CALLS = 8


def _nothing() -> Any:
    return None


@dataclass
class Session:
    """A program that has been set up.

    Attributes:
        step: What the program captures.
        call: One turn of the program's loop: it is given the step, captured or not, and the number
            of the turn, and returns what the user sees.
        state: Returns what is compared after the last call: parameters, buffers, optimizers.
    """

    step: Callable[..., Any]
    call: Callable[[Callable[..., Any], int], Any]
    state: Callable[[], Any] = _nothing


Start = Callable[[torch.device], Session]


@dataclass(frozen=True)
class Program:
    """A program by name.

    Attributes:
        name: Family, program and mode.
        start: Sets the program up on a device, from torch's present seed.
        ranks: How many ranks it runs on.
        calls: How many calls are compared.
        needs: Packages that it imports.
        remedy: What its user changes where the capture refuses it, in words.
        remedied: The program with that change.
    """

    name: str
    start: Start = field(repr=False)
    ranks: int = 1
    calls: int = CALLS
    needs: tuple[str, ...] = ()
    remedy: str = ""
    remedied: Start | None = field(default=None, repr=False)

    @property
    def family(self) -> str:
        """The first part of the name."""
        return self.name.partition("/")[0]

    @property
    def runs_here(self) -> bool:
        """Return True if the packages that it needs are installed."""
        return all(importlib.util.find_spec(package) for package in self.needs)


def draw(number: int) -> torch.Generator:
    """Return a generator on the host for the inputs of one call."""
    return torch.Generator().manual_seed(1000 + number)


def floats(number: int, *shape: int, device: torch.device) -> torch.Tensor:
    """Return normal numbers that are others at each call."""
    return torch.randn(*shape, generator=draw(number)).to(device)


def integers(number: int, low: int, high: int, *shape: int, device: torch.device) -> torch.Tensor:
    """Return whole numbers that are others at each call."""
    return torch.randint(low, high, shape, generator=draw(number)).to(device)


def weights(module: torch.nn.Module) -> dict[str, Any]:
    """Return parameters, their gradients and buffers by name."""
    named = dict(module.named_parameters())
    grads = {f"gradient of {name}": parameter.grad for name, parameter in named.items()}
    return {**named, **grads, **dict(module.named_buffers())}


def trained(module: torch.nn.Module, *others: Any) -> Callable[[], Any]:
    """Return what reads a module and the ``state_dict`` of everything else at the end."""
    return lambda: [weights(module), *(other.state_dict() for other in others)]
