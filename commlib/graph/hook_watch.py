"""Hooks that a function's run may call: of modules, optimizers and tensors."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers
from torch.utils.hooks import RemovableHandle

from commlib.graph.python.contents import Fact
from commlib.graph.python.setting import Same

Hooks = dict[Any, Any]

# Of all modules and all optimizers.
_GLOBAL: tuple[Hooks, ...] = (
    torch_modules._global_forward_pre_hooks,
    torch_modules._global_forward_hooks,
    torch_modules._global_backward_pre_hooks,
    torch_modules._global_backward_hooks,
    torch_optimizers._global_optimizer_pre_hooks,
    torch_optimizers._global_optimizer_post_hooks,
)
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class HookLook:
    """Hooks as they are now.

    Attributes:
        facts: Which hooks there are, by whose they are.
    """

    def __init__(self, owners: Iterable[Any]) -> None:
        self._made = RemovableHandle.next_id  # which each new hook raises
        found = [(0, "hooks of all modules", hooks) for hooks in _GLOBAL if hooks]
        found += [(id(x), name, hooks) for x in owners for name, hooks in _hooks_of(x) if hooks]
        self._counted = [(hooks, len(hooks)) for _, _, hooks in found]
        self.facts: list[Fact] = [
            ((where, name), tuple(map(Same, hooks.values()))) for where, name, hooks in found
        ]

    @property
    def is_old(self) -> bool:
        """Return True if hooks may have been added or removed since."""
        return self._made != RemovableHandle.next_id or bool(
            self._counted and any(len(hooks) != number for hooks, number in self._counted)
        )


def hooks_of_all() -> list[Any]:
    """Return the hooks of all modules and all optimizers."""
    return [hook for hooks in _GLOBAL for hook in hooks.values()]


def _hooks_of(x: Any) -> Iterator[tuple[str, Hooks]]:
    if isinstance(x, torch.Tensor):
        yield from ((name, getattr(x, name, None) or {}) for name in _OF_TENSORS)
        return
    for name, held in vars(x).items():
        if name.endswith("_hooks") and isinstance(held, dict):
            yield name, held
