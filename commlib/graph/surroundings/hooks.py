"""Hooks that a function's run may call: of modules, optimizers and tensors."""

from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any
from weakref import ref

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
_STORED_S = 1.0  # long after the number of a new hook was raised, torch has stored the hook
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class HookLook:
    """Hooks as they are now.

    It keeps no tensor alive: the release of one may tell that the program has replaced it.

    Attributes:
        facts: Which hooks there are, by whose they are.
    """

    def __init__(self, owners: Sequence[Any]) -> None:
        self._settled = self._made = 0  # numbers of hooks, which each new hook raises
        self._since = 0.0
        entries = [(0, "hooks of all modules", hooks, [*hooks.items()]) for hooks in _GLOBAL]
        for x in owners:
            entries += [(id(x), name, hooks, [*hooks.items()]) for name, hooks in _hooks_of(x)]
        self._empty = [hooks for _, _, hooks, items in entries if not items]
        self._known = [
            (hooks, [number for number, _ in items]) for *_, hooks, items in entries if items
        ]
        # torch makes the dicts of a tensor when it needs them.
        seen = {(owner, name) for owner, name, *_ in entries}
        tensors = [x for x in owners if isinstance(x, torch.Tensor)]
        self._bare = [
            (ref(x), at) for x in tensors for at in _OF_TENSORS if (id(x), at) not in seen
        ]
        self.facts: list[Fact] = [
            ((obj_id, name), tuple(Same(hook) for _, hook in items))
            for obj_id, name, _, items in entries
            if items
        ]

    @property
    def is_old(self) -> bool:
        """Return True if hooks have been added or removed since."""
        if self._known and any(len(hooks) != len(numbers) for hooks, numbers in self._known):
            return True
        return self._settled != RemovableHandle.next_id and self._has_changed()

    def _has_changed(self) -> bool:
        """Return True if one of these hooks is new.

        Most new hooks are others', such as those of one step's tensors. torch raises the number
        before it stores a hook, so a thread may still do that; after a while none does.
        """
        made, now = RemovableHandle.next_id, monotonic()
        if made != self._made:
            self._since, self._made = now, made  # in this order: other threads ask too
        if self._has_new():
            return True
        if now - self._since > _STORED_S:
            self._settled = made
        return False

    def _has_new(self) -> bool:
        return (
            any(self._empty)
            or any([*hooks] != numbers for hooks, numbers in self._known)
            or any(getattr(x(), name, None) is not None for x, name in self._bare)
        )


def hooks_of_all() -> list[Any]:
    """Return the hooks of all modules and all optimizers."""
    return [hook for hooks in _GLOBAL for hook in hooks.values()]


def _hooks_of(x: Any) -> Iterator[tuple[str, Hooks]]:
    """Yield the dicts of hooks that an object has, empty ones too."""
    if isinstance(x, torch.Tensor):
        held = ((name, getattr(x, name)) for name in _OF_TENSORS)
        yield from ((name, hooks) for name, hooks in held if hooks is not None)
        return
    for name, hooks in vars(x).items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            yield name, hooks
