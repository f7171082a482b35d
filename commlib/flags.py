"""Every flag of commlib: one row each, one parser, one place that reads them."""

import difflib
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commlib.errors import FlagError
from commlib.log import log

__all__ = ["Flag", "get", "override", "rows", "set", "table"]

UNIFIED = "FLAGS_dynamic_static_unified_comm"
TIMEOUT = "FLAGS_comm_timeout_s"
CLOSE_TIMEOUT = "FLAGS_comm_close_timeout_s"
CHANNEL = "FLAGS_comm_channel_mib"
CUSTOM_ALLREDUCE = "FLAGS_custom_allreduce"
ASYNC_BLOCKS = "FLAGS_comm_async_blocks"
CHECK = "FLAGS_comm_check"
RUN_TOKEN = "FLAGS_comm_run_token"
GRAPH_VERIFY = "FLAGS_graph_verify"

_TRUE = ("1", "true", "on", "yes")
_FALSE = ("0", "false", "off", "no")


def _boolean(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in _TRUE + _FALSE:
        raise FlagError(
            f"{name}={value!r} is not a boolean: expected one of {'/'.join(_TRUE)} or "
            f"{'/'.join(_FALSE)} in any case; type `export {name}=1` or `export {name}=0`"
        )
    return text in _TRUE


def _seconds(name: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise FlagError(
            f"{name}={value!r} is not a duration: expected a finite number of seconds above 0; "
            f"type for example `export {name}=600`"
        )
    return number


def _mebibytes(name: str, value: object) -> int:
    text = str(value).strip()
    if not text.isdecimal() or int(text) > 2048:
        raise FlagError(
            f"{name}={value!r} is no size: expected a whole number of MiB up to 2048, 0 for none; "
            f"type for example `export {name}=128`"
        )
    return int(text)


def _blocks(name: str, value: object) -> int:
    text = str(value).strip()
    if not text.isdecimal() or not 0 < int(text) <= 1024:
        raise FlagError(
            f"{name}={value!r} is not a number of blocks: expected a whole number from 1 to 1024; "
            f"set for example `export {name}=32`"
        )
    return int(text)


def _level(name: str, value: object) -> int:
    text = str(value).strip()
    if text not in ("0", "1", "2"):
        raise FlagError(
            f"{name}={value!r} is not a level: expected 0, 1 or 2; for example `export {name}=2`"
        )
    return int(text)


def _schedule(name: str, value: object) -> str | int:
    text = str(value).strip().lower()
    if text != "auto" and not text.isdecimal():
        raise FlagError(
            f"{name}={value!r} is not a schedule: expected auto, 0 for never, or a number N for "
            f"every N-th replay; for example `export {name}=1`"
        )
    return "auto" if text == "auto" else int(text)


def _token(name: str, value: object) -> str:
    text = str(value).strip()
    if len(text) > 128 or not text.isprintable() or "/" in text:
        raise FlagError(
            f"{name}={value!r} can't name a run: expected at most 128 printable characters without "
            f"a slash; set for example `export {name}=job-17`"
        )
    return text


@dataclass(frozen=True)
class Flag:
    """One row: what a flag is called, how its text is read, and what it is for."""

    name: str
    kind: str
    parse: Callable[[str, object], Any]
    default: Any
    sentence: str
    freezes: bool = False


_FLAGS = {
    flag.name: flag
    for flag in (
        Flag(
            UNIFIED,
            "bool",
            _boolean,
            False,
            "one CommContextManager owns the communicators (1) or torch.distributed groups do (0)",
            freezes=True,
        ),
        Flag(TIMEOUT, "seconds", _seconds, 600.0, "deadline of creating a ring and of a CPU wait"),
        Flag(CLOSE_TIMEOUT, "seconds", _seconds, 10.0, "deadline of closing one communicator"),
        Flag(
            CHANNEL,
            "MiB",
            _mebibytes,
            128,
            "GPU memory through which the ranks of one host exchange rows; 0: NCCL does it",
        ),
        Flag(
            CUSTOM_ALLREDUCE,
            "bool",
            _boolean,
            True,
            "kernels that push into the peers' memory carry what they do faster (1), or none (0)",
        ),
        Flag(
            ASYNC_BLOCKS,
            "blocks",
            _blocks,
            32,
            "most blocks of a push kernel that runs at the same time as compute (sync_op=False)",
        ),
        Flag(
            CHECK,
            "level",
            _level,
            1,
            "compare the ranks' calls: before every launch (2), at deadlines, close and every "
            "1000 calls (1), never (0)",
        ),
        Flag(
            RUN_TOKEN,
            "text",
            _token,
            "",
            "name of the run, the same on all its ranks: ranks of two runs refuse each other",
        ),
        Flag(
            GRAPH_VERIFY,
            "schedule",
            _schedule,
            "auto",
            "which replays of graphs are compared with the function: the first two and then ever "
            "fewer (auto), every N-th (N), none (0)",
        ),
    )
}
_set_values: dict[str, Any] = {}
_frozen: dict[str, Any] = {}


def _row(name: str) -> Flag:
    if name not in _FLAGS:
        raise FlagError(f"there is no flag {name!r}; flags here: {', '.join(sorted(_FLAGS))}")
    return _FLAGS[name]


def _current(flag: Flag) -> tuple[Any, str]:
    if flag.name in _set_values:
        return _set_values[flag.name], "set"
    if flag.name in os.environ:
        return flag.parse(flag.name, os.environ[flag.name]), "environment"
    return flag.default, "default"


def get(name: str) -> Any:
    """Return the value of flag ``name``: set > environment > default; frozen values stay.

    Raises ``FlagError`` for an unknown name or an environment text that can't be read.
    """
    flag = _row(name)
    return _frozen[name] if name in _frozen else _current(flag)[0]


def set(name: str, value: object) -> None:
    """Set flag ``name`` for this process, over the environment.

    Raises ``FlagError`` for an unknown name, an unreadable value, or a change of a frozen flag.
    """
    flag = _row(name)
    parsed = flag.parse(name, value)
    _refuse_change(name, parsed)
    _set_values[name] = parsed


def _refuse_change(name: str, value: object) -> None:
    if name in _frozen and _frozen[name] != value:
        raise FlagError(
            f"{name} was frozen at {_frozen[name]!r} when the first communicator was created; "
            f"given {value!r}. Set it before commlib.init(), or call commlib.shutdown() first"
        )


@contextmanager
def override(name: str, value: object) -> Iterator[None]:
    """Hold flag ``name`` at ``value`` inside a ``with`` block, then put back what was set."""
    _row(name)
    had, before = name in _set_values, _set_values.get(name)
    set(name, value)
    try:
        yield
    finally:
        if had:
            _set_values[name] = before
        else:
            _set_values.pop(name, None)


def freeze() -> None:
    """Fix the flags that choose the engine; called before each communicator is created.

    Raises ``FlagError`` when a frozen flag was changed in the environment since.
    """
    for flag in _FLAGS.values():
        if flag.freezes:
            value = _current(flag)[0]
            _refuse_change(flag.name, value)
            _frozen[flag.name] = value


def thaw() -> None:
    """Let frozen flags change again; called when no communicator is left."""
    _frozen.clear()


def rows() -> list[dict[str, Any]]:
    """Return one dict a flag: name, type, default, value, source, frozen, sentence."""
    return [
        {
            "name": flag.name,
            "type": flag.kind,
            "default": flag.default,
            "value": get(flag.name),
            "source": _current(flag)[1],
            "frozen": flag.name in _frozen,
            "sentence": flag.sentence,
        }
        for flag in _FLAGS.values()
    ]


def table() -> str:
    """Print every flag with type, default, value and source; return the same text."""
    columns = ("name", "type", "default", "value", "source")
    cells = [columns, *(tuple(str(row[c]) for c in columns) for row in rows())]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    text = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )
    print(text)
    return text


def unknown() -> list[tuple[str, str | None]]:
    """Find variables of the environment that look like flags of commlib, but are none.

    Returns:
        Pairs of a name and the flag with a similar name. The flag is None for a name that only
        begins like ours: it may belong to another library, such as Paddle.
    """
    found: list[tuple[str, str | None]] = []
    names = {flag.upper(): flag for flag in _FLAGS}
    for name in sorted(os.environ):
        if name in _FLAGS or not name.upper().startswith("FLAGS_"):
            continue
        close = difflib.get_close_matches(name.upper(), names, n=1, cutoff=0.85)
        if close or name.startswith(_BEGINNINGS):
            found.append((name, names[close[0]] if close else None))
    return found


_BEGINNINGS = (
    *("FLAGS_comm_", "FLAGS_dynamic_static_unified", "FLAGS_custom_allreduce"),
    "FLAGS_graph_",
)


def unknown_text(name: str, flag: str | None) -> str:
    """Describe one row of ``unknown()``."""
    if flag is not None:
        return f"{name} is set, but it is not a flag of commlib; did you mean {flag}?"
    return f"{name} is set, but it is not a flag of commlib; its flags: {', '.join(_FLAGS)}"


def _is_command() -> bool:
    """Whether this process is the command `commlib`, which says in a line what can't be read."""
    words, program = sys.orig_argv, (sys.argv or [""])[0]
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    as_module = module == ["commlib.tools.cli"] and program in ("-m", _CLI)  # found, or not yet
    return as_module or Path(program).name == "commlib"


_CLI = str(Path(__file__).parent / "tools" / "cli.py")


if not _is_command():
    for _flag in _FLAGS.values():  # unreadable text is an error now, not at the first collective
        _current(_flag)
    for _pair in unknown():
        log.warning("%s", unknown_text(*_pair))
