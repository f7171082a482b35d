"""A warning, once, for a function that is called in ever new ways; it says what changes."""

from commlib.graph.calls.cache_key import Arguments
from commlib.graph.replaying.entries import Entries
from commlib.graph.surroundings import Surroundings
from commlib.log import log

_MANY = 8  # kinds of calls, where most are replayed


class KindsWatch:
    """The last capture of a function in words, to be compared with a further kind of call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False
        self._last: tuple[list[str], dict[str, str]] | None = None

    def note(self, entries: Entries, call: Arguments, around: Surroundings) -> None:
        """Record a call that was captured, and what was around it; warn where none is replayed."""
        if len(entries) > _MANY and entries.replays < len(entries):
            self._warn(entries, call, around, "hardly any was replayed")
        self._last = call.described(), around.named()

    def note_full(self, entries: Entries, call: Arguments, around: Surroundings, most: int) -> None:
        """Warn of a call that gets no graph: there are ``most`` already."""
        what = f"calls of further kinds stay eager (max_graphs={most})"
        self._warn(entries, call, around, what)

    def _warn(self, entries: Entries, call: Arguments, around: Surroundings, what: str) -> None:
        """Warn once that there are many kinds: what happens, and how the call differs."""
        if self._warned:
            return
        self._warned = True
        changed = "" if self._last is None else f" ({_changed(*self._last, call, around)})"
        log.warning(
            "%s has %s graphs, and %s%s; pad what varies, or use a tensor in place of a "
            "number (lr=torch.tensor(0.1))", self._name, len(entries), what, changed,
        )  # fmt: skip


def _changed(
    last: list[str], settings: dict[str, str], call: Arguments, around: Surroundings
) -> str:
    """Return the differences of a call from the one that was captured last."""
    described = call.described()
    if len(last) != len(described):
        return f"the call has {len(described)} arguments, and had {len(last)}"
    for i, (was, now) in enumerate(zip(last, described, strict=True)):
        if was != now:
            return f"argument {i} is {now}, and was {was}"
    named = around.named()
    changed = [name for name in settings | named if settings.get(name) != named.get(name)]
    return f"{changed[0]} has changed" if changed else "torch's modes have changed"
