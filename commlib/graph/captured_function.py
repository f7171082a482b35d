"""A captured function, whose calls are replayed from graphs, one a key."""

import copy
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import count
from typing import Any, Concatenate, Generic, TypeVar, overload

import torch
from typing_extensions import ParamSpec, Self
from typing_extensions import TypeVar as DefaultVar

from commlib.core.manager import CommContextManager
from commlib.errors import GraphError
from commlib.graph.call_keys import CallKeys
from commlib.graph.calls.cache_key import Arguments
from commlib.graph.calls.graph_break import REPLAYS, graph_break
from commlib.graph.calls.openable import contents
from commlib.graph.first_call import FirstCall, device_of, makes_parameters
from commlib.graph.kinds_watch import KindsWatch
from commlib.graph.methods import bound
from commlib.graph.operators.unsupported import check_hidden, check_unreadable, check_wanting
from commlib.graph.options import Options, check_function
from commlib.graph.python.taking_code import check_consumed
from commlib.graph.python.user_names import function_name
from commlib.graph.recording.capture_run import called_unhooked
from commlib.graph.recording.rank_agreement import same_key
from commlib.graph.replaying.compare import load_kernels
from commlib.graph.replaying.entries import Entries, Entry
from commlib.graph.replaying.outcome import Unequal
from commlib.graph.replaying.schedule import Schedule
from commlib.graph.used_tensors import UsedTensors
from commlib.graph.watching.host import OtherValue
from commlib.graph.watching.runs import check_foreign, inside
from commlib.log import log
from commlib.streams import capturing

everything: "weakref.WeakSet[CapturedFunction[..., Any]]" = weakref.WeakSet()

P = ParamSpec("P", default=...)
R = DefaultVar("R", default=Any)
Q = ParamSpec("Q")
Owner = TypeVar("Owner")


class CapturedFunction(Generic[P, R]):
    """A captured function; call it as the function. ``reset()`` releases its graphs."""

    def __init__(self, fn: Callable[P, R], options: Options) -> None:
        check_function(fn)
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.options, self._schedule = fn, options, Schedule(options.verify)
        if self._schedule.ever and torch.cuda.is_initialized() and not capturing():
            load_kernels(torch.cuda.current_device())
        self.entries = Entries()
        self.eager: dict[Any, str] = {}  # calls that stay eager, and why
        self._kinds = KindsWatch(self.name)
        self._seen: set[Any] = set()  # keys of calls that came once, and were not captured yet
        self._lock = threading.RLock()
        self._of_classes: dict[type, Any] = {}  # bound by ``classmethod``
        self._turns = count(1)  # replays of any kind since the last capture: as on all ranks
        owner = getattr(fn, "__self__", fn)  # of a bound method
        self._module = owner if isinstance(owner, torch.nn.Module) else None
        self._keys = CallKeys(fn, options.key, options.max_graphs)
        self._used = UsedTensors()
        everything.add(self)

    @overload
    def __get__(self, owner: None, kind: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: "CapturedFunction[Concatenate[Owner, Q], R]", owner: Owner, kind: type | None = None
    ) -> Callable[Q, R]: ...

    @graph_break(REPLAYS)
    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """Return the method bound to ``owner``, captured for that object alone."""
        return self if owner is None else bound(self, owner, self._of_classes)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CapturedFunction[P, R]":
        """Return a captured copy of the function, which has no graph yet."""
        return type(self)(copy.deepcopy(self.fn, memo), self.options)

    def __copy__(self) -> "CapturedFunction[P, R]":
        """Return the same function without its graphs."""
        return type(self)(self.fn, self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the function and the options; graphs stay in their process."""
        return type(self), (self.fn, self.options)

    @graph_break(REPLAYS)
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Replay the call's graph on the current stream, or capture it first."""
        if inside():
            return self.fn(*args, **kwargs)  # part of a larger capture
        try:
            call = self._keys.of(args, kwargs)
        except GraphError as why:
            return self._without_key(why, args, kwargs)
        if self.options.agree is not None:
            self._agree_on(call.key, self.options.agree)
        entry = self.entries.get(call.key)
        if entry is not None and (entry.stale or entry.places.have_changed()):
            self._drop_stale(call.key, entry)
            entry = None
        if entry is None and self._is_eager(call):
            return self.fn(*args, **kwargs)
        try:
            if entry is not None:
                # A verified call undoes no other thread's work. Eager parts may wait for others.
                with nullcontext() if entry.has_eager_parts else self._lock:
                    if self.entries.get(call.key) is entry:  # else another thread has dropped it
                        replayed: R = entry.run(call, sys._getframe(1), next(self._turns))
                        return replayed
                entry = None
            return self._first_call(call)
        except Unequal as error:
            self._drop_different(call.key, error)
            real: R = error.result
            return real
        except OtherValue as error:
            self.entries.drop_lost(call.key, entry)
            log.once("a call of %s is made eagerly: %s", self.name, error)
        except BaseException as error:
            lost = self.entries.drop_lost(call.key, entry)
            if not isinstance(error, GraphError) or (entry is not None and not lost):
                raise  # the call is wrong, not the capture
            self._stay_eager(call.key, error)
        return called_unhooked(self.fn, args, kwargs)

    def _drop_stale(self, key: Any, entry: Entry) -> None:
        """Release an entry whose tensors were replaced; this call is captured again."""
        with self._lock:  # no thread replays it
            error = self.entries.drop_stale(key, entry, self.name)
        if error is not None:
            self._stay_eager(key, error)

    def _is_eager(self, call: Arguments) -> bool:
        """Return True for a call without a graph that does not get one."""
        is_eager = call.key in self.eager
        if is_eager or max(len(self.entries), len(self.eager)) < self.options.max_graphs:
            return is_eager
        self._kinds.note_full(self.entries, call, self._keys.around, self.options.max_graphs)
        return True

    def _drop_different(self, key: Any, error: Unequal) -> None:
        """Release a graph that differs from the function; calls of its kind are eager now."""
        if self.options.on_fail == "raise":
            self.entries.drop(key)
        else:
            self.entries.pop(key, None)  # backwards of earlier calls may follow
        self._stay_eager(key, error)

    def _stay_eager(self, key: Any, error: GraphError) -> None:
        """Have calls of this key run eagerly, unless the error is to be raised."""
        if self.options.on_fail == "raise" or error.done:
            if isinstance(error, Unequal):
                raise error.public() from None
            raise error
        self.eager[key] = str(error)
        if isinstance(error, Unequal):
            log.warning("a call of %s is eager from now on: %s", self.name, error)
        else:
            log.once("a call of %s stays eager: %s", self.name, error)

    def _without_key(self, error: GraphError, args: Any, kwargs: Any) -> R:
        """Make a call without a key eagerly, unless the error is to be raised."""
        if self.options.on_fail == "raise":
            raise error
        if self.options.agree is not None:
            self._agree_on(str(error), self.options.agree)
        log.once("a call of %s stays eager: %s", self.name, error)
        return self.fn(*args, **kwargs)

    def _agree_on(self, key: Any, ring_id: int) -> None:
        """Compare keys with the other ranks; where one has no graph, all capture."""
        cached = key in self.entries or key in self.eager
        if not same_key(CommContextManager.instance().get(ring_id), key, cached) and cached:
            self.eager.pop(key, None)
            self.entries.drop(key)

    def __repr__(self) -> str:
        graphs = f"{len(self.entries)} graphs{f', {len(self.eager)} eager' if self.eager else ''}"
        return f"<CapturedFunction {self.name}: {graphs}, {self.entries.replays} replays>"

    @property
    def __commlib_captures__(self) -> Callable[P, R]:
        """The function itself."""
        return self.fn

    @property
    def name(self) -> str:
        """The function's name."""
        return function_name(self.fn)

    def _first_call(self, call: Arguments) -> R:
        """Make the call eagerly, and capture a graph for the next calls of its kind."""
        check_foreign()
        check_unreadable(call.tensors)
        check_consumed(self.fn, call.leaves, *call.given)
        reach = self._keys.find(call.leaves)
        if makes_parameters(reach.modules, call):
            return self.fn(*call.given[0], **call.given[1])
        device = device_of(call, self._module)
        if device.type == "cpu":
            check_hidden(reach.modules)
        first = FirstCall(self.fn, self.options, self._schedule, device, reach, self.entries.times)
        opened = contents(*call.given)
        after_call = self._keys.before_call(call, opened)
        wanted = [x.requires_grad for x in call.tensors]
        result: R = first.counted.make(call, opened, after_call)
        try:
            first.counted.check()
            check_wanting(call.tensors, wanted)
            self._capture(call, first)
        except GraphError as error:
            self._give_up(call, first, wanted, error)
        finally:
            first.counted.forget()
        return result

    def _capture(self, call: Arguments, first: FirstCall) -> None:
        """Capture the call from where it began; once more if it asks whether it is captured."""
        try:
            with first.counted.put_back():
                self._add_entry(call, first)
        except GraphError as error:
            if not error.reads:
                raise
            first.findings.report_capture()
            with first.counted.put_back():
                self._add_entry(call, first)
            log.warning_once(
                "%s reads values on the host unless torch.cuda.is_current_stream_capturing() "
                "is true. Its graphs use the captured variant, whose last digits may differ",
                self.name)  # fmt: skip

    def _add_entry(self, call: Arguments, first: FirstCall) -> None:
        # What the call has changed of its surroundings is not part of the key from now on.
        call = self._keys.of(*call.given)
        if call.key in self.entries:
            return
        if first.counted.begins_grads and call.key not in self._seen:
            self._seen.add(call.key)  # of many calls, as a rule: later ones add to these gradients
            return
        first.rehearse(call)
        if self._keys.grads.add(first.findings.owners):
            self.entries.clear()  # backwards of earlier calls may follow
            call = self._keys.of(*call.given)
        entry = first.entry(call, functools.partial(self._drop_different, call.key))
        entry.places = self._keys.places(call, entry.uses)
        self.entries[call.key] = entry
        self._turns = count(1)
        self._kinds.note(self.entries, call, self._keys.around)
        self._used.note(self._module)
        for ring in first.findings.rings:
            ring._lifecycle.graphs.add(self)

    def _give_up(
        self, call: Arguments, first: FirstCall, wanted: list[bool], error: GraphError
    ) -> None:
        """Undo the call and raise, or have the next calls of its kind run eagerly.

        ``wanted``: which of its tensors required grad before the call.
        """
        if self.options.on_fail == "raise":
            if first.counted.counted or first.findings.irreversible:
                raise GraphError(
                    f"{error}; the effects of the call were kept: do not repeat it", done=True
                ) from error
            first.counted.undo()
            for tensor, one in zip(call.tensors, wanted, strict=True):
                if tensor.requires_grad != one and tensor.is_leaf:
                    tensor.requires_grad_(one)
        if wanted != [x.requires_grad for x in call.tensors]:
            self._stay_eager(call.key, error)  # the key of the next such call
        with suppress(GraphError):  # as it is now, no key can hold it
            call = self._keys.of(*call.given)
        self._stay_eager(call.key, error)

    def check(self) -> None:
        """Raise ``GraphError`` if a tensor that the graphs use was replaced since the capture.

        It has other memory now (``p.data = ...``), or is another parameter or buffer of a captured
        module. Each tensor takes some 50 ns: ask after loading weights, or while looking for a bug.
        """
        self._used.check(self.name, self._module, self.entries.captured)

    def reset(self) -> None:
        """Release every graph; the next calls capture again."""
        self.entries.drop_all()
        self.eager.clear()
        self._seen.clear()
        self._used = UsedTensors()
        self._keys = CallKeys(self.fn, self.options.key, self.options.max_graphs)
