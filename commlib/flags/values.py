"""Parsers of flag values: each returns the value of a text, or raises ``FlagError``."""

import math

from commlib.errors import FlagError

_TRUE = ("1", "true", "on", "yes")
_FALSE = ("0", "false", "off", "no")


def boolean(name: str, value: object) -> bool:
    """Return a boolean, given as one or as a word in any case."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in _TRUE + _FALSE:
        raise FlagError(
            f"{name}={value!r} is not a boolean: expected one of {'/'.join(_TRUE)} or "
            f"{'/'.join(_FALSE)} in any case; run `export {name}=1` or `export {name}=0`"
        )
    return text in _TRUE


def seconds(name: str, value: object) -> float:
    """Return a finite number of seconds above 0."""
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise FlagError(
            f"{name}={value!r} is not a duration: expected a finite number of seconds above 0; "
            f"run for example `export {name}=600`"
        )
    return number


def mebibytes(name: str, value: object) -> int:
    """Return a size from 0 to 2048 MiB."""
    text = str(value).strip()
    if not text.isdecimal() or int(text) > 2048:
        raise FlagError(
            f"{name}={value!r} is not a size: expected a whole number of MiB up to 2048, 0 for "
            f"none; run for example `export {name}=128`"
        )
    return int(text)


def blocks(name: str, value: object) -> int:
    """Return a number of CUDA blocks from 1 to 1024."""
    text = str(value).strip()
    if not text.isdecimal() or not 0 < int(text) <= 1024:
        raise FlagError(
            f"{name}={value!r} is not a number of blocks: expected a whole number from 1 to 1024; "
            f"run for example `export {name}=32`"
        )
    return int(text)


def replays(name: str, value: object) -> int:
    """Return a number of replays from 0 to 10000."""
    text = str(value).strip()
    if not text.isdecimal() or int(text) > 10000:
        raise FlagError(
            f"{name}={value!r} is not a number of replays: expected a whole number up to 10000, 0 "
            f"for none; run for example `export {name}=100`"
        )
    return int(text)


def level(name: str, value: object) -> int:
    """Return a level: 0, 1 or 2."""
    text = str(value).strip()
    if text not in ("0", "1", "2"):
        raise FlagError(
            f"{name}={value!r} is not a level: expected 0, 1 or 2; "
            f"run for example `export {name}=2`"
        )
    return int(text)


def release(name: str, value: object) -> int:
    """Return a release of Paddle: 2 or 3, or 0 for none."""
    text = str(value).strip()
    if text not in ("0", "2", "3"):
        raise FlagError(
            f"{name}={value!r} is not a release of Paddle: expected 2 or 3, 0 for none; "
            f"run for example `export {name}=3`"
        )
    return int(text)


def schedule(name: str, value: object) -> str | int:
    """Return "auto", or N for every N-th replay (0: never)."""
    text = str(value).strip().lower()
    if text != "auto" and not text.isdecimal():
        raise FlagError(
            f"{name}={value!r} is not a schedule: expected auto, 0 for never, or a number N for "
            f"every N-th replay; run for example `export {name}=1`"
        )
    return "auto" if text == "auto" else int(text)


def token(name: str, value: object) -> str:
    """Return the name of a run: at most 128 printable characters without a slash."""
    text = str(value).strip()
    if len(text) > 128 or not text.isprintable() or "/" in text:
        raise FlagError(
            f"{name}={value!r} can't name a run: expected at most 128 printable characters without "
            f"a slash; run for example `export {name}=job-17`"
        )
    return text
