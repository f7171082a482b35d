"""Flags of commlib: one row per flag. No other file reads a flag from the environment."""

import difflib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commlib import flag_values
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
TORCH_BACKEND = "FLAGS_comm_torch_backend"
GRAPH_VERIFY = "FLAGS_graph_verify"


@dataclass(frozen=True)
class Flag:
    """One flag: its name, the type and parser of its value, its default and its description."""

    name: str
    kind: str
    parse: Callable[[str, object], Any]
    default: Any
    description: str
    freezes: bool = False


_FLAGS = {
    flag.name: flag
    for flag in (
        Flag(
            UNIFIED,
            "bool",
            flag_values.boolean,
            False,
            "one CommContextManager owns the communicators (1) or torch.distributed groups do (0)",
            freezes=True,
        ),
        Flag(
            TIMEOUT,
            "seconds",
            flag_values.seconds,
            600.0,
            "deadline of creating a ring and of a CPU wait",
        ),
        Flag(
            CLOSE_TIMEOUT,
            "seconds",
            flag_values.seconds,
            10.0,
            "deadline of closing one communicator",
        ),
        Flag(
            CHANNEL,
            "MiB",
            flag_values.mebibytes,
            128,
            "GPU memory through which the ranks of one host exchange rows; 0: NCCL moves them",
        ),
        Flag(
            CUSTOM_ALLREDUCE,
            "bool",
            flag_values.boolean,
            True,
            "push kernels run the collectives that they run faster (1), or none (0)",
        ),
        Flag(
            ASYNC_BLOCKS,
            "blocks",
            flag_values.blocks,
            32,
            "most blocks of a push kernel that runs at the same time as compute (sync_op=False)",
        ),
        Flag(
            CHECK,
            "level",
            flag_values.level,
            1,
            "compare the ranks' calls: before every launch (2), at deadlines, close and every "
            "1000 calls (1), never (0)",
        ),
        Flag(
            RUN_TOKEN,
            "text",
            flag_values.token,
            "",
            "name of the run, the same on all its ranks: ranks of two runs reject each other",
        ),
        Flag(
            TORCH_BACKEND,
            "bool",
            flag_values.boolean,
            False,
            "torch.distributed makes rings for nccl, gloo and the default backend (1); read by "
            "`import torch`",
        ),
        Flag(
            GRAPH_VERIFY,
            "schedule",
            flag_values.schedule,
            "auto",
            "replays that are compared with the function: the first two and then fewer and fewer "
            "(auto), every N-th (N), none (0)",
        ),
    )
}
_PREFIXES = (  # a variable with one of these is reported even if no flag has a similar name
    *("FLAGS_comm_", "FLAGS_dynamic_static_unified", "FLAGS_custom_allreduce"),
    "FLAGS_graph_",
)
_set_values: dict[str, Any] = {}
_frozen: dict[str, Any] = {}


def _flag(name: str) -> Flag:
    if name not in _FLAGS:
        raise FlagError(f"there is no flag {name!r}; flags here: {', '.join(sorted(_FLAGS))}")
    return _FLAGS[name]


def _current(flag: Flag) -> tuple[Any, str]:
    """Return the value of a flag, without regard to a freeze, and its source."""
    if flag.name in _set_values:
        return _set_values[flag.name], "set"
    if flag.name in os.environ:
        return flag.parse(flag.name, os.environ[flag.name]), "environment"
    return flag.default, "default"


def get(name: str) -> Any:
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
    flag = _flag(name)
    return _frozen[name] if name in _frozen else _current(flag)[0]


def set(name: str, value: object) -> None:
    """Set a flag for this process. The value wins over the environment.

    Args:
        name: The full name of the flag.
        value: The new value, or a text that the flag's parser accepts.

    Raises:
        FlagError: The name is unknown, the value can't be parsed, or the flag is frozen at
            another value.
    """
    flag = _flag(name)
    parsed = flag.parse(name, value)
    _check_not_frozen(name, parsed)
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

    Raises:
        FlagError: As ``set``.
    """
    _flag(name)
    was_set, before = name in _set_values, _set_values.get(name)
    set(name, value)
    try:
        yield
    finally:
        if was_set:
            _set_values[name] = before
        else:
            _set_values.pop(name, None)


def freeze() -> None:
    """Fix the flags that choose the engine; called before each communicator is created.

    Raises ``FlagError`` when the environment has changed a frozen flag.
    """
    for flag in _FLAGS.values():
        if flag.freezes:
            value = _current(flag)[0]
            _check_not_frozen(flag.name, value)
            _frozen[flag.name] = value


def thaw() -> None:
    """Allow changes of frozen flags again; called when no communicator is left."""
    _frozen.clear()


def rows() -> list[dict[str, Any]]:
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
        for flag in _FLAGS.values()
    ]


def table() -> str:
    """Return a text table of all flags; the command `commlib flags` prints it.

    Returns:
        One line per flag with its name, type, default, value and source, below a header line.

    Raises:
        FlagError: A text in the environment can't be parsed.
    """
    columns = ("name", "type", "default", "value", "source")
    cells = [columns, *(tuple(str(row[c]) for c in columns) for row in rows())]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def unknown() -> list[tuple[str, str | None]]:
    """Return environment variables that look like flags of commlib but are not.

    Returns:
        Pairs of a name and the flag with a similar name. The flag is None if only the prefix
        matches: the variable may belong to another library, such as Paddle.
    """
    found: list[tuple[str, str | None]] = []
    names = {flag.upper(): flag for flag in _FLAGS}
    for name in sorted(os.environ):
        if name in _FLAGS or not name.upper().startswith("FLAGS_"):
            continue
        close = difflib.get_close_matches(name.upper(), names, n=1, cutoff=0.85)
        if close or name.startswith(_PREFIXES):
            found.append((name, names[close[0]] if close else None))
    return found


def unknown_text(name: str, flag: str | None) -> str:
    """Return the message about one pair of ``unknown()``."""
    if flag is not None:
        return f"{name} is set, but it is not a flag of commlib; did you mean {flag}?"
    return f"{name} is set, but it is not a flag of commlib; its flags: {', '.join(_FLAGS)}"


def _is_command() -> bool:
    """Return True in the command `commlib`, which reports unreadable flags in one line."""
    words, program = sys.orig_argv, (sys.argv or [""])[0]
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    main = str(Path(__file__).parent / "__main__.py")
    as_module = module == ["commlib"] and program in ("-m", main)  # "-m" until Python finds it
    return as_module or Path(program).name == "commlib"


if not _is_command():
    for _one in _FLAGS.values():  # unreadable text is an error now, not at the first collective
        _current(_one)
    for _pair in unknown():
        log.warning("%s", unknown_text(*_pair))
