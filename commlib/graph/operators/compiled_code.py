"""Compiled code as one operator: a run that is watched sees what it takes, writes and returns."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from commlib.core import observers
from commlib.graph.operators.schema import Described, Facts


class CompiledCode(Described):
    """Code whose kernels no dispatch mode sees, such as that of Inductor.

    Attributes:
        facts: What a recorder has to know of it.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[list[Any]], Sequence[Any]],
        *,
        writes: Sequence[int] = (),
        draws: bool = False,
    ) -> None:
        """Store the code.

        Args:
            name: What it is called in errors.
            run: Runs it. It gets a list of the arguments, which it may empty.
            writes: Positions of the arguments that it writes to.
            draws: Whether it draws random numbers from torch's own generator.
        """
        self._name, self._run = name, run
        self.facts = Facts(
            text=name,
            only_views=False,
            reshapes=False,
            draws=draws,
            generator=True,
            syncs=False,
            waits=False,
            computes=True,
            copies=False,
            indexed=False,
            takes_memory=False,
            lifts=False,
            detaches=False,
            writes=tuple((i, "") for i in writes),
            lists=False,
            unsaid=(),
            learns=None,
            own_random=False,
            own=False,
        )

    def name(self) -> str:
        """Return the name."""
        return self._name

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the code, unseen: what watches a run calls this."""
        return self._run(list(args))

    def call(self, args: list[Any]) -> Sequence[Any]:
        """Run the code as one operator of the run that is watched, if one is; empties ``args``."""
        mode = _watching_mode()
        if mode is None:
            return self._run(args)
        values = tuple(args)
        args.clear()
        with observers.unwatched():
            outputs: Sequence[Any] = mode.__torch_dispatch__(self, (), values, {})
        return outputs


def _watching_mode() -> TorchDispatchMode | None:
    """Return the innermost mode of this thread that watches a run for a capture."""
    if not observers.observers:
        return None
    stack: list[Any] = _get_current_dispatch_mode_stack()
    return next((x for x in reversed(stack) if any(x is one for one in observers.observers)), None)
