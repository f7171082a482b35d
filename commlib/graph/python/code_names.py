"""The names in a piece of code: attributes that it reads, globals and modules that it looks up."""

import dis
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

_LOOKS_UP = ("LOAD_GLOBAL", "LOAD_NAME")
_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")
# These read attributes by names that are computed, or all of them.
_BY_NAME = frozenset(
    (
        *("getattr", "hasattr", "vars", "dir", "eval", "exec", "locals", "globals", "__dict__"),
        *(
            "__getattribute__",
            "format_map",
            "Formatter",
            "attrgetter",
            "methodcaller",
            "tree_map",
            "tree_flatten",
        ),
        *(
            "tree_leaves",
            "__builtins__",
            "__import__",
            "import_module",
            "f_locals",
            "f_globals",
            "ops",
        ),
    )
)
_OTHER_CALLS = ("CALL_FUNCTION_EX", "CALL_KW", "KW_NAMES")
_WITH_A_NAME = ("getattr", "hasattr")


class CodeNames(NamedTuple):
    """Names in code, and the code that is nested in it.

    Attributes:
        read: Attributes that it reads, and texts in it, which may be names.
        looked_up: Globals.
        imported: Modules that it imports where it runs; relative names begin with dots.
        by_name: What it uses to read attributes by computed names.
    """

    read: frozenset[str]
    looked_up: frozenset[str]
    imported: frozenset[str]
    by_name: frozenset[str]


@lru_cache(maxsize=20_000)
def names_of(code: CodeType) -> CodeNames:
    """Return what code names."""
    # The upper bits of an argument are a step before that of its instruction.
    steps = [x for x in dis.get_instructions(code) if x.opname != "EXTENDED_ARG"]
    read = {x.argval for x in steps if x.opname in _READS}
    looked_up = {x.argval for x in steps if x.opname in _LOOKS_UP}
    imports = ((i, x.argval) for i, x in enumerate(steps) if x.opname == "IMPORT_NAME")
    imported = {"." * steps[i - 2].argval + name for i, name in imports}  # the level comes first
    named = [i for i, x in enumerate(steps) if isinstance(x.argval, str) and x.argval in _BY_NAME]
    by_name = {steps[i].argval for i in named if _reads_any(steps, i)}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = names_of(constant)
            read |= inner.read
            looked_up |= inner.looked_up
            imported |= inner.imported
            by_name |= inner.by_name
        elif isinstance(constant, str | tuple | frozenset):
            read.update(_texts(constant))
    return CodeNames(frozenset(read), frozenset(looked_up), frozenset(imported), frozenset(by_name))


def _texts(constant: Any) -> Iterator[str]:
    if isinstance(constant, str):
        yield constant
        if "{" in constant:  # a format, which may read attributes
            yield from re.findall(r"[^\W\d]\w*", constant)
    elif isinstance(constant, tuple | frozenset):
        for each in constant:
            yield from _texts(each)


def _reads_any(steps: Sequence[dis.Instruction], at: int) -> bool:
    """Return False for a text, a store, and for a ``getattr`` of a name that is written there."""
    step = steps[at]
    if step.opname not in (*_LOOKS_UP, *_READS):
        return False
    if step.opname not in _LOOKS_UP or step.argval not in _WITH_A_NAME:
        return True
    return not _is_given_a_text(steps[at + 1 :])


def _is_given_a_text(steps: Sequence[dis.Instruction]) -> bool:
    """Return True if the second argument of the call that ``steps`` begin is a text.

    The stack is followed to the call. Where that takes a branch, the answer is False.
    """
    depth, second = 0, -1  # arguments on the stack, and the step that has put the second one there
    for i, step in enumerate(steps):
        if step.opname in ("PRECALL", "CALL") and depth == step.arg:
            text = second >= 0 and steps[second].opname == "LOAD_CONST"
            return text and isinstance(steps[second].argval, str)
        other_way = step.opcode in dis.hasjrel or step.opcode in dis.hasjabs
        if other_way or depth < 0 or step.opname in _OTHER_CALLS:
            return False
        before = depth
        if step.opname == "CALL":
            depth -= (step.arg or 0) + 1
        elif step.opname != "PRECALL":  # before a CALL, which takes all of its arguments
            depth += dis.stack_effect(step.opcode, step.arg, jump=False)
        if before == 1 and depth == 2:
            second = i
        elif before != 1 and depth <= 2:
            second = -1  # the second argument was worked on since
    return False
