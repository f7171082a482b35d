"""The options of collectives, for their overloads."""

from datetime import timedelta
from typing import Literal, TypedDict

from commlib.engines.reduction_names import RingReduction


class Options(TypedDict, total=False):
    """Options of every collective."""

    use_calc_stream: bool
    fenced: bool
    timeout: float | timedelta | None


class Waited(Options, total=False):
    """Options of a call that returns its result."""

    sync_op: Literal[True]


class Unwaited(Options):
    """Options of a call that returns a ``Work``."""

    sync_op: Literal[False]


class Either(Options):
    """Options of a call whose ``sync_op`` is a variable."""

    sync_op: bool


class Reducing(TypedDict, total=False):
    """Options of every collective that reduces."""

    op: RingReduction
    factor: float | None


class ReducingWaited(Reducing, Waited, total=False):
    """Options of a reduction that returns its result."""


class ReducingUnwaited(Reducing, Unwaited):
    """Options of a reduction that returns a ``Work``."""


class ReducingEither(Reducing, Either):
    """Options of a reduction whose ``sync_op`` is a variable."""
