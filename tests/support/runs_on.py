"""A decorator that makes a test of a function that runs on live ranks."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

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
        first = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        further = list(inspect.signature(body).parameters.values())[1:]
        signature = inspect.Signature([first, *further])

        @functools.wraps(body)
        def test(*values: Any, **named: Any) -> None:
            ranks, *arguments = signature.bind(*values, **named).arguments.values()
            ranks(_run, name, *arguments, deadline=deadline, lost=lost)

        test.__signature__ = signature  # type: ignore[attr-defined]
        return test

    return test_of


def _run(ring: Any, name: tuple[str, str], *arguments: object) -> None:
    """Run the body of a test; pickle would find the test under this name instead."""
    importlib.import_module(name[0])
    _bodies[name](ring, *arguments)
