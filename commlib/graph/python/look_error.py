"""The error for an object of the program that raises as it is looked at."""

from traceback import format_exception_only

from commlib.errors import GraphError


def look_error(error: Exception) -> GraphError:
    """Return what to raise in place of ``error``, with its text."""
    (text,) = format_exception_only(error)[-1:]  # also where its own text is an error
    return GraphError(
        f"an object that the function can reach raises as it is looked at: {text.strip()}; keep it "
        f"out of the function's arguments, closure and globals, or mark the part that needs it "
        f"with commlib.graph.eager"
    )
