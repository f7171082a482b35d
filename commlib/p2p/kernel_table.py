"""Selection of a kernel: a pure function of collective, bytes, ranks, dtype and operation."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

TABLE = Path(__file__).with_name("table.json")
SIZES = range(2, 9)  # members of a ring that the kernels serve
FLOATS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
OPS = {"sum": "sum", "avg": "sum", "max": "max", "min": "min"}
VECTOR = 16  # bytes that a thread moves at a time


class Row(NamedTuple):
    """One row of the table: calls of up to ``most`` bytes run ``kernel`` on at most ``blocks``.

    ``most`` counts the tensor of an all_reduce, one rank's part of any other collective.
    ``threads`` are those of a block; in two hops those of it that serve one peer; or those of one
    row that is normalised. Kernel "nccl" leaves the call to NCCL.
    """

    most: int
    kernel: str
    threads: int
    blocks: int


@cache
def text() -> str:
    """Return the text of the table's file. It is fixed at the first use."""
    return TABLE.read_text()


@cache
def table() -> dict[str, dict[int, tuple[Row, ...]]]:
    """Return the rows of each collective and number of ranks, smallest first."""
    read = json.loads(text())
    return {
        collective: {int(size): tuple(Row(*row) for row in rows) for size, rows in sizes.items()}
        for collective, sizes in read["collectives"].items()
    }


def write(path: Path, collectives: Mapping[str, Mapping[int, Sequence[Row]]]) -> None:
    """Write a table, one row per line. A concurrent reader gets the old table or the new one."""
    lines = []
    for collective, sizes in collectives.items():
        rows_of = []
        for size, rows in sizes.items():
            rows_of.append(f'      "{size}": [\n        ' + ",\n        ".join(map(_line, rows)))
        lines.append(
            f'    "{collective}": {{\n' + "\n      ],\n".join(rows_of) + "\n      ]\n    }"
        )
    columns = json.dumps(Row._fields)
    part = path.with_name(f".{path.name}.part")
    part.write_text(
        f'{{\n  "columns": {columns},\n  "collectives": {{\n' + ",\n".join(lines) + "\n  }\n}\n"
    )
    part.replace(path)


def _line(row: Row) -> str:
    return json.dumps(list(row))


def select_kernel(collective: str, nbytes: int, size: int) -> Row | None:
    """Return the row for ``nbytes`` in a ring of ``size``, or None: NCCL does it."""
    for row in table()[collective].get(size, ()):
        if nbytes <= row.most:
            return None if row.kernel == "nccl" else row
    return None


def refusal(dtype: torch.dtype, op: str) -> str | None:
    """Return why the kernels don't reduce ``dtype`` by ``op``."""
    if dtype.is_floating_point and dtype not in FLOATS:
        return f"no kernel takes {dtype}"
    if dtype not in FLOATS:
        return f"{dtype} leaves no bit pattern free to mark data that has not arrived"
    if op not in OPS:
        return f"no kernel computes {op}"
    return None


def room(kernel: str, half: int, size: int) -> int:
    """Return the bytes of a call (as in ``Row.most``) that fit into ``half`` bytes of the channel.

    One-shot: one slot per rank, each holding the whole tensor. Two-shot: two sets of slots, one
    slice each. Packets take twice their payload. Each slot has room for rounding to whole vectors.
    """
    slots = 2 if in_two_hops(kernel) else 2 * size if kernel == "packets" else size
    return (half - 2 * size * VECTOR) // slots // VECTOR * VECTOR


def in_two_hops(kernel: str) -> bool:
    """Return True if a kernel reduces one slice of the tensor on each rank, and hands it on."""
    return kernel.startswith("two_shot")


def shape(row: Row, vectors: int, size: int) -> tuple[int, int]:
    """Return blocks and threads of the launch that shares ``vectors`` in a ring of ``size``.

    A thread has one vector while there are enough blocks.
    """
    threads = row.threads
    if in_two_hops(row.kernel):
        vectors, threads = -(-vectors // size), threads * (size - 1)
    return max(1, min(row.blocks, -(-vectors // row.threads))), threads
