"""A decorator that makes a test of a function that runs on live ranks."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from tests.support.ranks import Ranks

Body = Callable[..., None]
_bodies: dict[tuple[str, str], Body] = {}


def runs_on(
    fixture: str, *, deadline: float = 60, lost: frozenset[int] = frozenset()
) -> Callable[[Body], Body]:
    """Run the decorated function on every rank of a fixture, with the rank's ring 0.

    Args:
        fixture: Name of a fixture that returns ``Ranks``.
        deadline: Seconds until a rank that has not finished fails the test.
        lost: Ranks that must die of SIGKILL in the function.

    Returns:
        A decorator. The test has the fixture and the function's further parameters, which are
        fixtures or parameters as in any other test.
    """

    def test_of(body: Body) -> Body:
        name = (body.__module__, body.__qualname__)
        _bodies[name] = body
        further = list(inspect.signature(body).parameters.values())[1:]

        @functools.wraps(body)
        def test(**given: Any) -> None:
            ranks: Ranks = given.pop(fixture)
            arguments = [given[each.name] for each in further if each.name in given]
            ranks(_run, name, *arguments, deadline=deadline, lost=lost)

        first = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([first, *further])  # type: ignore[attr-defined]
        return test

    return test_of


def _run(ring: Any, name: tuple[str, str], *arguments: object) -> None:
    """Run the body of a test; pickle would find the test under this name instead."""
    importlib.import_module(name[0])
    _bodies[name](ring, *arguments)
