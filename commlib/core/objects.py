"""Python objects as bytes: data by default, and what needs code only where the program asks.

An object travels as ``torch.save`` writes it and is read with ``weights_only=True``: nothing that
another rank has sent is run as code. Tensors, numbers, text, bytes, lists, tuples, dicts and sets
of these need no more; other classes are named once per program with
``torch.serialization.add_safe_globals([Class])``, on every rank.
"""

import io
from pickle import UnpicklingError
from typing import Any

import torch

from commlib.core.ring import Ring
from commlib.errors import ArgumentError


def encode(ring: Ring, collective: str, obj: object, *, pickle: bool) -> bytes:
    """Return an object as bytes that ``decode`` can read on every rank.

    Raises:
        ArgumentError: It contains what only code can restore.
    """
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
        if not pickle:
            _load(ring, buffer, pickle=False)
    except Exception as error:  # pickle passes on whatever the object's own methods raise
        problem = f"an object of type {type(obj).__name__} can't be carried"
        raise _refused(ring, collective, problem, buffer, error) from error
    return buffer.getvalue()


def decode(ring: Ring, collective: str, data: bytes, *, pickle: bool) -> Any:
    """Read an object; tensors of any GPU are put on the ring's device.

    Args:
        ring: The ring.
        collective: What the program has called, for error texts.
        data: What ``encode`` returned on some rank.
        pickle: Run the code that restores the object: whatever its sender has chosen.

    Raises:
        ArgumentError: It contains what only code can restore, and ``pickle`` is False.
    """
    buffer = io.BytesIO(data)
    try:
        return _load(ring, buffer, pickle=pickle)
    except UnpicklingError as error:
        raise _refused(ring, collective, "a received object is refused", buffer, error) from error


def _load(ring: Ring, buffer: io.BytesIO, *, pickle: bool) -> Any:
    def placed(storage: Any, location: str) -> Any:
        target = location if location == "cpu" else str(ring.device)
        return torch.serialization.default_restore_location(storage, target)

    buffer.seek(0)
    torch.serialization.add_safe_globals([bytes])  # no bytes at all are saved as bytes()
    return torch.load(buffer, map_location=placed, weights_only=not pickle)


def _refused(
    ring: Ring, collective: str, what: str, buffer: io.BytesIO, error: Exception
) -> ArgumentError:
    """Return the error of an object; it names the classes that the program has not allowed."""
    why = str(error)
    if isinstance(error, UnpicklingError):
        names = _not_allowed(buffer)
        why = f"torch can't read it as data: {error.__context__ or error}; pass other values"
        if names:
            why = (
                f"it contains {', '.join(names)}; pass plain values and tensors, or call "
                f"torch.serialization.add_safe_globals([...]) with these classes on every rank"
            )
    return ArgumentError(f"{ring._describe(collective)}: {what}: {why}")


def _not_allowed(buffer: io.BytesIO) -> list[str]:
    """Return the classes that the program has not allowed, as far as torch can read the data."""
    buffer.seek(0)
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(buffer))
    except UnpicklingError:
        return []
