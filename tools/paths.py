"""Checks, made before any work, that results can be written to a path."""

import os
from pathlib import Path


def file_refusal(path: str) -> str | None:
    """Return why no file can be written at ``path``, or None if it can."""
    file = Path(path)
    if file.is_dir():
        return f"{path} is a folder: expected a file; pass {file / 'results.json'}"
    if not file.parent.is_dir():
        return f"{path}: there is no folder {file.parent}; run mkdir -p {file.parent}"
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        return f"{path} can't be written by this user; pass another path"
    return None


def folder_refusal(path: str) -> str | None:
    """Return why ``path`` can't be a folder for new files, or None if it can."""
    folder = Path(path).absolute()
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    if not existing.is_dir():
        return f"{path}: {existing} is not a folder; pass another one"
    if not os.access(existing, os.W_OK):
        return f"{path}: {existing} can't be written by this user; pass another folder"
    return None
