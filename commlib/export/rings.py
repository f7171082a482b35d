"""The rings that an exported program calls: recorded in its file, compared when it is loaded."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from commlib.core.manager import comm
from commlib.errors import ArgumentError, RingError

_BRANCHING = ("associative_scan", "cond", "map", "map_impl", "scan", "while_loop")
Members = Mapping[int, Sequence[int]]  # global ranks by ring id, in the order of the ring


def describe(program: torch.export.ExportedProgram) -> str:
    """Return the members of each ring that the program calls, as text for ``read``.

    Raises:
        RingError: The program calls a ring that does not exist on this rank.
    """
    numbers = sorted(set(_ring_ids(program.graph_module)))
    return json.dumps({number: list(comm(number).ranks) for number in numbers})


def read(file: object, text: str) -> Members:
    """Return what ``describe`` wrote.

    Raises:
        ArgumentError: ``text`` is empty: another function saved the file.
    """
    if not text:
        raise ArgumentError(
            f"loading {file}: it does not record the members of its rings; save it with "
            f"commlib.export, or load it with torch's function, which compares nothing"
        )
    return {int(number): ranks for number, ranks in json.loads(text).items()}


def check(file: object, recorded: Members, ranks: Members | None) -> None:
    """Compare the rings of this process with those of the export.

    Args:
        file: The file, for the error.
        recorded: The members at the export.
        ranks: Members that replace those of the export, for some of the rings.

    Raises:
        ArgumentError: ``ranks`` names a ring that the program does not call, or another number
            of members.
        RingError: A ring does not exist on this rank, or it has other members.
    """
    replaced = dict(ranks or {})
    for number, members in replaced.items():
        if len(members) != len(recorded.get(number, ())):
            raise ArgumentError(
                f"loading {file}: ranks={{{number}: {list(members)}}}; the program was exported "
                f"with the rings {dict(recorded)}; pass as many ranks, for one of these rings"
            )
    for number, exported in recorded.items():
        expected, ring = list(replaced.get(number, exported)), comm(number)
        if list(ring.ranks) != expected:
            raise RingError(
                f"{ring._describe('loading')} {file}: the ring has the ranks {list(ring.ranks)}; "
                f"expected {expected}; create ring {number} with these members, or export the "
                f"program on this layout"
            )


def in_branches(program: torch.export.ExportedProgram) -> Iterator[int]:
    """Yield the ring of each registered op in branches of ``torch.cond`` and in loops."""
    for part in _graphs(program.graph_module):
        for node in part.graph.nodes:
            if getattr(node.target, "__name__", "") in _BRANCHING:
                names = [str(x.target) for x in node.all_input_nodes if x.op == "get_attr"]
                for inner in map(part.get_submodule, names):
                    yield from _ring_ids(inner)


def _graphs(program: torch.nn.Module) -> Iterator[torch.fx.GraphModule]:
    """Yield the graphs of a program, those of branches, loops and contexts included."""
    return (x for x in program.modules() if isinstance(x, torch.fx.GraphModule))


def _ring_ids(program: torch.nn.Module) -> Iterator[int]:
    """Yield the ring of each registered op, also of those in branches and loops."""
    for graph in _graphs(program):
        for node in graph.graph.nodes:
            yield from _ring_id(node)


def _ring_id(node: Any) -> Iterator[int]:
    """Yield the ring of a node that calls a registered op, alone or with its effect token."""
    values = (node.target, *node.args)
    for index, value in enumerate(values):
        if getattr(value, "namespace", "") == "commlib":
            names = [argument.name for argument in value._schema.arguments]
            if "ring_id" in names:
                yield values[index + 1 + names.index("ring_id")]
