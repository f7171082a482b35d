"""The values of flags. No other file reads a flag from the environment."""

import difflib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from textwrap import fill
from typing import Any, TypedDict, overload

from commlib import torch_allocator
from commlib.errors import FlagError
from commlib.flags.registry import ASYNC_BLOCKS as ASYNC_BLOCKS
from commlib.flags.registry import CHANNEL as CHANNEL
from commlib.flags.registry import CHECK as CHECK
from commlib.flags.registry import CLOSE_TIMEOUT as CLOSE_TIMEOUT
from commlib.flags.registry import CUSTOM_ALLREDUCE as CUSTOM_ALLREDUCE
from commlib.flags.registry import (
    FLAGS,
    PREFIXES,
    Flag,
    Number,
    Schedule,
    Seconds,
    Switch,
    Text,
    Value,
)
from commlib.flags.registry import GRAPH_DRIFT as GRAPH_DRIFT
from commlib.flags.registry import GRAPH_VERIFY as GRAPH_VERIFY
from commlib.flags.registry import MALLOC_ASYNC as MALLOC_ASYNC
from commlib.flags.registry import PADDLE_VERSION as PADDLE_VERSION
from commlib.flags.registry import RUN_TOKEN as RUN_TOKEN
from commlib.flags.registry import TIMEOUT as TIMEOUT
from commlib.flags.registry import TORCH_BACKEND as TORCH_BACKEND
from commlib.flags.registry import UNIFIED as UNIFIED
from commlib.log import log

__all__ = ["Flag", "get", "override", "rows", "set", "table"]


def __dir__() -> list[str]:
    """List the public names."""
    return [*__all__]


_INDENT: Any = {"initial_indent": "    ", "subsequent_indent": "    "}  # of meanings in a table

_set_values: dict[str, Value] = {}
_frozen: dict[str, Value] = {}


class FlagRow(TypedDict):
    """One flag as ``rows`` returns it."""

    name: str
    type: str
    default: Value
    value: Value
    source: str
    frozen: bool
    description: str


def _flag(name: str) -> Flag:
    if name not in FLAGS:
        raise FlagError(f"there is no flag {name!r}; flags here: {', '.join(sorted(FLAGS))}")
    return FLAGS[name]


def _current(flag: Flag) -> tuple[Value, str]:
    """Return the value of a flag, without regard to a freeze, and its source."""
    if flag.name in _set_values:
        return _set_values[flag.name], "set"
    text = os.environ.get(flag.name, "")
    if text.strip():  # as a variable of a shell script that is empty, and means nothing
        return flag.parse(flag.name, text), "environment"
    return flag.default, "default"


@overload
def get(name: Switch) -> bool: ...
@overload
def get(name: Seconds) -> float: ...
@overload
def get(name: Number) -> int: ...
@overload
def get(name: Text) -> str: ...
@overload
def get(name: Schedule) -> int | str: ...
@overload
def get(name: str) -> Value: ...


def get(name: str) -> Value:
    """Return the value of a flag.

    A value from ``set`` wins over the environment, and the environment over the default. A frozen
    flag keeps the value that it was frozen at.

    Args:
        name: The full name of the flag, such as ``"FLAGS_comm_timeout_s"``.

    Returns:
        The parsed value: a bool, number or text.

    Raises:
        FlagError: The name is unknown, or the text in the environment can't be parsed.
    """
    flag = FLAGS.get(name) or _flag(name)
    return _frozen[name] if name in _frozen else _current(flag)[0]


def set(name: str, value: object) -> None:
    """Set a flag for this process. The value wins over the environment.

    Args:
        name: The full name of the flag.
        value: The new value, or a text that the flag's parser accepts.

    Raises:
        FlagError: The name is unknown, the value can't be parsed, the flag is frozen at another
            value, or torch can't change its allocator any more.
    """
    flag = _flag(name)
    parsed = flag.parse(name, value)
    _check_not_frozen(name, parsed)
    if name == MALLOC_ASYNC and parsed:
        torch_allocator.select_malloc_async(name, os.environ)
    _set_values[name] = parsed


def _check_not_frozen(name: str, value: object) -> None:
    if name in _frozen and _frozen[name] != value:
        raise FlagError(
            f"{name} was frozen at {_frozen[name]!r} when the first communicator was created; "
            f"given {value!r}. Set it before commlib.init(), or call commlib.shutdown() first"
        )


@contextmanager
def override(name: str, value: object) -> Iterator[None]:
    """Set a flag inside a ``with`` block and restore it at the end.

    Args:
        name: The full name of the flag.
        value: The value inside the block.

    Yields:
        None.

    Raises:
        FlagError: As ``set``.
    """
    _flag(name)
    before = _set_values.get(name)
    set(name, value)
    try:
        yield
    finally:
        if before is None:
            _set_values.pop(name, None)
        else:
            _set_values[name] = before


def freeze() -> None:
    """Fix the flags that choose the engine; called before each communicator is created.

    Raises ``FlagError`` when the environment has changed a frozen flag.
    """
    for flag in FLAGS.values():
        if flag.freezes:
            value = _current(flag)[0]
            _check_not_frozen(flag.name, value)
            _frozen[flag.name] = value


def thaw() -> None:
    """Allow changes of frozen flags again; called when no communicator is left."""
    _frozen.clear()


def rows() -> list[FlagRow]:
    """Return every flag as a dictionary.

    Returns:
        One dictionary per flag with the keys name, type, default, value, source ("set",
        "environment" or "default"), frozen and description.

    Raises:
        FlagError: A text in the environment can't be parsed.
    """
    return [
        {
            "name": flag.name,
            "type": flag.kind,
            "default": flag.default,
            "value": get(flag.name),
            "source": _current(flag)[1],
            "frozen": flag.name in _frozen,
            "description": flag.description,
        }
        for flag in FLAGS.values()
    ]


def table() -> str:
    """Return a text table of all flags; the command `commlib flags` prints it.

    Returns:
        One line per flag with its name, type, default, value and source, below a header line; each
        is followed by a line with the flag's meaning.

    Raises:
        FlagError: A text in the environment can't be parsed.
    """
    columns = ("name", "type", "default", "value", "source")
    lines: list[dict[str, Any]] = [{**row} for row in rows()]
    cells = [columns, *(tuple(str(line[c]) for c in columns) for line in lines)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    heading, *texts = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )
    meanings = (fill(line["description"], 80, **_INDENT) for line in lines)
    return "\n".join([heading, *(f"{a}\n{b}" for a, b in zip(texts, meanings, strict=True))])


def unknown() -> list[tuple[str, str | None]]:
    """Return environment variables that look like flags of commlib but are not.

    Returns:
        Pairs of a name and the flag with a similar name. The flag is None if only the prefix
        matches: the variable may belong to another library, such as Paddle.
    """
    pairs: list[tuple[str, str | None]] = []
    names = {flag.upper(): flag for flag in FLAGS}
    for name in sorted(os.environ):
        if name in FLAGS or not name.upper().startswith("FLAGS_"):
            continue
        close = difflib.get_close_matches(name.upper(), names, n=1, cutoff=0.85)
        if close or name.startswith(PREFIXES):
            pairs.append((name, names[close[0]] if close else None))
    return pairs


def unknown_text(name: str, flag: str | None) -> str:
    """Return the message about one pair of ``unknown()``."""
    if flag is not None:
        return f"{name} is set, but it is not a flag of commlib; did you mean {flag}?"
    return f"{name} is set, but it is not a flag of commlib; its flags: {', '.join(FLAGS)}"


def check() -> None:
    """Read every flag, and select the allocator of torch that one of them names.

    Raises ``FlagError`` if a text in the environment can't be parsed, or comes too late for torch.
    """
    for flag in FLAGS.values():
        _current(flag)
    if get(MALLOC_ASYNC):
        torch_allocator.select_malloc_async(MALLOC_ASYNC, os.environ)


def _is_command() -> bool:
    """Return True in the command `commlib`, which reports unreadable flags in one line."""
    words, program = sys.orig_argv, (sys.argv or [""])[0]
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    main = str(Path(__file__).parent.parent / "__main__.py")
    as_module = module == ["commlib"] and program in ("-m", main)  # "-m" until Python finds it
    return as_module or Path(program).name == "commlib"


with suppress(FlagError) if _is_command() else nullcontext():  # the command shows it in one line
    check()  # now, not at the first collective
if not _is_command():
    for _pair in unknown():
        log.warning("%s", unknown_text(*_pair))
