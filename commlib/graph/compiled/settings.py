"""Options of the backend: those of capture, and settings of Inductor."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from commlib.errors import GraphError
from commlib.graph.options import Options
from commlib.graph.replaying.schedule import Schedule

# The others are about a function that the program has written, and there is none.
_CAPTURE = ("agree", "max_graphs", "on_fail", "outputs", "tolerance", "verify", "warmup")
_MODES = ("default", "max-autotune-no-cudagraphs")
_OWN_GRAPHS = "triton.cudagraphs"  # Inductor's


class Settings(NamedTuple):
    """The checked ``mode`` and ``options`` of ``torch.compile``.

    Attributes:
        capture: How the compiled code is captured.
        inductor: Settings of Inductor by name.
    """

    capture: Options
    inductor: dict[str, Any]

    @classmethod
    def of(cls, mode: str | None, options: Mapping[str, Any] | None) -> "Settings":
        """Return the settings. Raises ``GraphError`` for one that does not exist or can't be."""
        from torch._inductor import list_mode_options, list_options  # slow to import

        _check_mode(mode)
        inductor: dict[str, Any] = dict(list_mode_options(mode)) if mode else {}
        supported, capture = set(list_options()), {}
        for name, value in (options or {}).items():
            if name in _CAPTURE:
                capture[name] = value
            elif name == _OWN_GRAPHS and value:
                raise GraphError(
                    f"options={{{name!r}: {value!r}}}: Inductor would make graphs inside of these; "
                    f"leave it out"
                )
            elif name.replace("-", "_") in supported:
                inductor[name.replace("-", "_")] = value
            else:
                raise GraphError(
                    f"options has no {name!r}: expected {', '.join(_CAPTURE)}, or a setting of "
                    f"torch._inductor.list_options()"
                )
        return cls(capture_options(capture), inductor | {_OWN_GRAPHS: False})


def capture_options(given: Mapping[str, Any]) -> Options:
    """Return options of ``capture`` for compiled code.

    Its results are fresh tensors unless they are asked for otherwise, as compiled code's are; what
    can't be captured runs eagerly. Raises ``GraphError`` for an unknown one.
    """
    for name in given:
        if name not in _CAPTURE:
            raise GraphError(
                f"a graph of compiled code has no option {name!r}; it has {', '.join(_CAPTURE)}"
            )
    options = Options.of({"outputs": "copy", "on_fail": "eager", **given})
    Schedule(options.verify)  # raises unless it is one
    return options


def _check_mode(mode: str | None) -> None:
    if mode is None or mode in _MODES:
        return
    why = (
        "it turns on Inductor's own CUDA graphs, inside of these"
        if mode in ("reduce-overhead", "max-autotune")
        else "it is not a mode of torch.compile"
    )
    raise GraphError(f"mode={mode!r}: {why}; expected {' or '.join(map(repr, _MODES))}")
