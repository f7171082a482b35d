"""The runs of a function before its capture: what they show, and how they are undone."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from commlib import _observers
from commlib.errors import GraphError
from commlib.graph.engine import Engine
from commlib.graph.generators import default_generator, moved_on
from commlib.graph.leaves import leaf, parameters, plain_gradients, with_grads, without_grads
from commlib.graph.ledger import Collective, Ledger
from commlib.graph.outputs import leads_back
from commlib.graph.pieces import Pieces, Warming, apart
from commlib.graph.signature import Arguments
from commlib.graph.vote import AlreadyRun, settle


def named(module: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module by name."""
    if module is None:
        return {}
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class WarmUp:
    """The runs of a function before its capture, and what they have shown."""

    def __init__(
        self, fn: Callable[..., Any], engine: Engine, device: torch.device, *, keeps_last: bool
    ) -> None:
        self._fn, self._engine, self._device = fn, engine, device
        self._keeps_last = keeps_last
        self.collectives: list[Collective] = []
        self.generators: list[torch.Generator] = []
        self.rings: list[Any] = []
        self.differentiable = False
        self.parameters: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor | None] = []
        self._named = named(fn if isinstance(fn, torch.nn.Module) else None)
        self._texts: dict[str, list[str]] = {}  # by part: its collectives in words
        self.broken = False  # whether parts lie outside
        self._settled = True  # whether the capture has to be as the last run
        self._names: list[str] = []  # operators of the function itself, and its collectives
        self._calls: list[str] = []
        self._made: dict[int, StorageWeakRef] = {}
        self._carried: set[int] = set()  # of these, what the last run has read
        self.eager_seconds: float | None = None  # host time of a run that nobody watched

    def run(self, call: Arguments, times: int) -> Any:
        """Run ``call`` and undo, but for the last run if it is to stay; returns its result.

        Behind two or more that are undone comes one that nobody watches: it tells the eager time.
        """
        result, drawn = None, None
        # A run that stays may be the one that sets things up.
        self._settled = times > 1 or not self._keeps_last
        for turn in range(times):
            ledger = Ledger(self._device, drawn=drawn)
            stays = self._keeps_last and turn == times - 1
            if stays:
                ledger.without_saving()
            with moved_on([] if stays or drawn is None else drawn):
                result = self._once(call, ledger, undo=not stays, as_before=0 < turn == times - 1)
            own = default_generator(self._device)
            drawn = [own, *(x for x, _ in ledger.generators.values() if x is not own)]
        if times > 1 and not self._keeps_last:
            self._once(call, ledger, undo=True, watched=False)
        return result

    def _once(
        self,
        call: Arguments,
        ledger: Ledger,
        *,
        undo: bool,
        as_before: bool = False,
        watched: bool = True,
    ) -> Any:
        """Run once; every member of the rings in ``ledger`` comes through, or all of them raise."""
        result, problem, run = None, None, Warming()
        with self._engine.warming(), run.under_way(), _observers.unwaited() as works:
            try:
                if not watched:
                    ledger.save_again()
                before = self._names
                result = self._run(call, ledger, undo=undo, watched=watched)
                if as_before:
                    same("two runs of the function differ", before, self._names)
                if self._keeps_last and run.broken:
                    raise GraphError(
                        'first="warmup" of a function with eager parts, which would run in the '
                        'capture too; type first="once"'
                    )
            except Exception as error:
                problem = error
            for work in works:  # one that nobody waits for would write behind the undoing
                try:
                    work.wait()
                except Exception as error:
                    problem = problem or error
            self._engine.join(ledger.rings)
            if undo or problem is not None:
                result = None
                try:
                    ledger.restore()
                except Exception as error:  # the other ranks wait to hear of it
                    problem = problem or error
        self.rings, self.collectives = ledger.rings, ledger.collectives
        self.generators = [
            generator
            for generator, _ in ledger.generators.values()
            if generator.device.type == "cuda"
            and generator is not default_generator(generator.device)
        ]
        self.broken = self.broken or run.broken
        settle(self.rings, self.collectives, problem, counted=not undo)
        return result

    def _run(self, call: Arguments, ledger: Ledger, *, undo: bool, watched: bool) -> Any:
        grad = torch.is_grad_enabled()
        inputs = with_grads([leaf(x) if grad and undo else x for x in call.tensors], call.tensors)
        args, kwargs = call.rebuilt(inputs)
        with ledger if watched else nullcontext(), apart():
            began = time.perf_counter()
            result = self._fn(*args, **kwargs)
            if not call.still(inputs, args, kwargs):
                raise GraphError(
                    "the function changes a list or dict that it is given, and no replay would; "
                    "return what is new"
                )
            if watched:
                self._names, self._calls = list(ledger.names), list(map(str, ledger.collectives))
            if undo:
                self._go_back(result, inputs, ledger if watched else None)
            seconds = time.perf_counter() - began
        without_grads(inputs, call.tensors)
        if watched:
            self._check_grads(ledger)
            self.check_state(ledger)
            self._note_outputs(result, ledger)
            self._carried = {key for key in ledger.externals if self._lives(key)}
            if undo:
                self._made.update(ledger.made)
        else:
            self.eager_seconds = seconds
        return result

    def _go_back(self, result: Any, inputs: Sequence[torch.Tensor], ledger: Ledger | None) -> None:
        """Run the backward too, where there is one; without a ledger, to the known leaves."""
        outs = [x for x in tree_leaves(result) if leads_back(x)]
        self.differentiable = bool(outs)
        if outs:
            computed = [] if ledger is None else ledger.computed
            if ledger is not None:
                self.parameters = parameters(ledger, inputs)
            wanted = [x for x in (*inputs, *self.parameters) if x.requires_grad]
            ones = [torch.ones_like(x) for x in outs]
            if not wanted and not computed:
                raise GraphError("an output wants a gradient, and no tensor before it does")
            found = plain_gradients(outs, (*wanted, *computed), ones)
            for tensor, grad in zip(computed, found[len(wanted) :], strict=True):
                if grad is not None:
                    raise GraphError(
                        f"a {tuple(tensor.shape)} tensor that the function reads, but is not "
                        f"given, wants a gradient: pass it as an argument, or detach it"
                    )

    def _check_grads(self, ledger: Ledger) -> None:
        """Refuse gradients that the first run makes: the graph would know no address for them.

        So would no replay make what it writes outside a part of the caller's autograd graph.
        """
        tied = ledger.new_history()
        if tied:
            raise GraphError(
                f"a {tuple(tied[0].shape)} tensor that the function is given, or uses, is written "
                f"with something that wants a gradient; write x.detach() into it, or return it"
            )
        new = ledger.new_grads()
        if new:
            names = {id(p): name for name, p in self._named.items()}
            told = [names.get(id(p), f"a leaf of shape {tuple(p.shape)}") for p in new[:5]]
            raise GraphError(
                f"grad of {', '.join(told)} was None before the first call and is written in it; "
                f"give it memory first: zero_grad(set_to_none=False) behind one eager backward"
            )

    def check_state(self, ledger: Ledger) -> None:
        """Refuse to go on from state that a run has made and the next one has written.

        It is one run ahead, and what it was before that run is not known.
        """
        written = [memory for key, (memory, _) in ledger.saved.items() if self._lives(key)]
        if written:
            sizes = ", ".join(f"{memory.nbytes()} bytes" for memory in written[:5])
            raise AlreadyRun(
                f"{len(written)} tensors ({sizes}) that the function makes in its first run and "
                f"writes in the next, such as an optimizer's state, have counted a run before the "
                f"capture; make them anew, and call the function once eagerly before you capture "
                f'it, or type first="warmup", warmup=1'
            )

    def check_carried(self, ledgers: Sequence[Ledger]) -> None:
        """Refuse state that each run makes anew from the last one's: its name is rebound.

        What one run makes for all others, such as a table, the capture reads too.
        """
        lost = [key for key in self._carried if not any(key in each.externals for each in ledgers)]
        if lost:
            raise AlreadyRun(
                f"{len(lost)} tensors that the function makes in one run and reads in the next "
                f"(state = state + ...) have counted the runs before the capture; put back what "
                f"they were, and write into their memory instead (state.add_(...))"
            )

    def _lives(self, key: int) -> bool:
        """Whether memory is still there that an earlier run has made."""
        return key in self._made and not self._made[key].expired()

    def _note_outputs(self, result: Any, ledger: Ledger) -> None:
        """Know what the result is made of, and which of it the function has made."""
        self._outputs = [
            torch.empty_like(x, device="meta")
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata in ledger.made
            else None
            for x in tree_leaves(result)
        ]

    def rooms(self) -> list[torch.Tensor | None]:
        """Return memory outside the pool for each leaf of the result that the function makes."""
        return [
            None if x is None else torch.empty_strided(
                x.shape, x.stride(), dtype=x.dtype, device=self._device
            )
            for x in self._outputs
        ]  # fmt: skip

    def compare(self, part: str, pieces: Pieces) -> None:
        """Refuse a capture that has done something else than the run before it, or than the last.

        Such as a function that asks whether it is being captured.
        """
        texts = list(map(str, pieces.collectives))
        if part == "forward" and self._settled:
            names = [name for ledger in pieces.ledgers for name in ledger.names]
            what = "the run before the capture and the capture differ"
            same(what, self._names, names[: pieces.own])
            same(what, self._calls, texts)
        same("two captures of the function differ", self._texts.setdefault(part, texts), texts)


def same(what: str, before: list[str], after: list[str]) -> None:
    """Raise ``GraphError`` naming the first of the calls in which two lists differ."""
    if before == after:
        return
    shortest = min(len(before), len(after))
    first = next((i for i in range(shortest) if before[i] != after[i]), shortest)
    was, now = (names[first] if first < len(names) else "nothing" for names in (before, after))
    raise GraphError(
        f"{what}: call number {first} was {was}, then {now}; a graph would repeat one of them. "
        f"More warmup= runs may settle it"
    )
