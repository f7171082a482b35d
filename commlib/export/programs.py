"""torch.export.save and load, with the members of the program's rings in the file."""

import os
from typing import Any

import torch

from commlib.export import rings

_FILE = "commlib_rings.json"  # in the archive


def save(
    program: torch.export.ExportedProgram,
    path: str | os.PathLike[str],
    *,
    extra_files: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Save an exported program with ``torch.export.save``, and the members of its rings.

    Args:
        program: What ``torch.export.export`` returned.
        path: The file; its name ends in ".pt2".
        extra_files: Further files of the archive: contents by name.
        **options: Passed to ``torch.export.save``.

    Raises:
        RingError: The program calls a ring that does not exist on this rank.
    """
    files = {**(extra_files or {}), _FILE: rings.describe(program)}
    torch.export.save(program, path, extra_files=files, **options)


def load(
    path: str | os.PathLike[str],
    *,
    ranks: rings.Members | None = None,
    extra_files: dict[str, Any] | None = None,
    **options: Any,
) -> torch.export.ExportedProgram:
    """Load what ``save`` wrote, after comparing the rings; nothing is launched.

    Args:
        path: The file.
        ranks: Expected members of a ring, by its id, in place of those of the export. For a copy
            of the program on other ranks. As many as at the export.
        extra_files: Is filled with the further files of the archive.
        **options: Passed to ``torch.export.load``.

    Returns:
        The program; ``program.module()`` can be called.

    Raises:
        RingError: A ring of the program does not exist on this rank, or has other members.
        ArgumentError: The file does not record its rings, or ``ranks`` does not fit.
    """
    files: dict[str, Any] = {_FILE: ""}
    program = torch.export.load(path, extra_files=files, **options)
    rings.check(path, rings.read(path, files.pop(_FILE)), ranks)
    if extra_files is not None:
        extra_files.update(files)
    return program
