"""Whether results can be written where they are wanted, asked before the work is done."""

import os
from pathlib import Path


def file_refusal(path: str) -> str | None:
    """Say why no file can be written at ``path``; None when it can."""
    file = Path(path)
    if file.is_dir():
        return f"{path} is a folder: expected a file; type {file / 'results.json'}"
    if not file.parent.is_dir():
        return f"{path}: there is no folder {file.parent}; type mkdir -p {file.parent}"
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        return f"{path} can't be written by this user; type another path"
    return None


def folder_refusal(path: str) -> str | None:
    """Say why ``path`` is no folder for files and can't be made one; None when it can."""
    folder = Path(path).absolute()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if not there.is_dir():
        return f"{path}: {there} is no folder; type another one"
    if not os.access(there, os.W_OK):
        return f"{path}: {there} can't be written by this user; type another folder"
    return None
