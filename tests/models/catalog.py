"""All programs by name."""

import functools
import importlib

from tests.models.program import Program

_FAMILIES = (
    "tests.models.transformers_models",
    "tests.models.multimodal",
    "tests.models.generation",
    "tests.models.optimizers",
    "tests.models.mixed_precision",
    "tests.models.training",
    "tests.models.nano_gpt",
    "tests.models.third_party",
    "tests.models.two_ranks",
)


@functools.cache
def programs() -> dict[str, Program]:
    """Return every program of every family by name."""
    by_name: dict[str, Program] = {}
    for family in _FAMILIES:
        for program in importlib.import_module(family).PROGRAMS:
            if program.name in by_name:
                raise ValueError(f"two programs are called {program.name}")
            by_name[program.name] = program
    return by_name
