"""The order of arguments that two releases of Paddle have differently."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from commlib import flags
from commlib.log import log

F = TypeVar("F", bound=Callable[..., Any])


def output_first_in_paddle_3(function: F) -> F:
    """Read the first two positional arguments in the order of the Paddle release that is selected.

    Args:
        function: A function that takes its input and then its output, as Paddle 2 does.

    Returns:
        A function of the same signature. With ``FLAGS_comm_paddle_version=3`` its first positional
        argument is the output.
    """
    name, second = function.__name__, list(inspect.signature(function).parameters)[1]

    @functools.wraps(function)
    def in_order(*args: Any, **kwargs: Any) -> Any:
        release = flags.get(flags.PADDLE_VERSION) if args else 2
        if release == 0:
            log.warning_once(
                "paddle.distributed.%s: read as in Paddle 2, input first; Paddle 3 has the output "
                "first. Set FLAGS_comm_paddle_version to 2 or 3, or pass both by keyword",
                name,
            )
        if release != 3:
            return function(*args, **kwargs)
        if len(args) == 1:
            return function(**{second: args[0]}, **kwargs)
        return function(args[1], args[0], *args[2:], **kwargs)

    return cast(F, in_order)
