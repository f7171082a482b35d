"""The backend for ``torch.compile``, and the pass for FX graphs."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from commlib.graph.compiled.check import check_graph, check_static
from commlib.graph.compiled.effects import with_plain_effects
from commlib.graph.compiled.inductor import compile_region
from commlib.graph.compiled.layouts import layouts
from commlib.graph.compiled.live_attributes import follower, has_attributes
from commlib.graph.compiled.parts import lost_write
from commlib.graph.compiled.region import Code, Region
from commlib.graph.compiled.settings import Settings, capture_options
from commlib.graph.compiled.sharing import Lost
from commlib.graph.compiled.static_positions import static_positions

_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')


class CompileBackend:
    """``torch.compile(model, backend=commlib.graph.backend)``.

    Inductor compiles the model as it always does. Its code is then captured, with the collectives
    of rings in it, and replayed from graphs. ``apply`` does the same for an FX graph as it is.
    """

    __name__ = "commlib.graph.backend"  # torch names a backend by it

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile a graph with Inductor and return a function that is replayed from graphs.

        Args:
            gm: The graph, which this takes over.
            example_inputs: Its inputs, or fakes of them.
            mode: "default" or "max-autotune-no-cudagraphs", as for Inductor.
            options: Options of ``capture`` (agree, max_graphs, on_fail, outputs, tolerance, verify,
                warmup) and settings of Inductor, by name. Unless they say otherwise, results are
                copies (``outputs="copy"``), and what can't be captured runs eagerly
                (``on_fail="eager"``).

        Raises:
            GraphError: An argument is wrong, or would bring in Inductor's own graphs.
        """
        settings = Settings.of(mode, options)
        check_graph("graph.backend", gm, example_inputs)
        region = Region(_name_of(gm), settings.capture)
        if any(map(_is_wrapper, example_inputs)):
            # The partitions have what they hold, and captured functions take plain tensors.
            region.cuts.append((region.name, "wrappers (DTensor) are unpacked between graphs"))
        static = static_positions(gm, example_inputs)
        code = compile_region(gm, example_inputs, settings.inductor, region)
        region.hold(code, static, example_inputs)
        return region

    def apply(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        static_inputs: Sequence[int] | None = None,
        **options: Any,
    ) -> Region:
        """Return a function that replays an FX graph, whose operators stay as they are.

        Args:
            gm: The graph.
            example_inputs: Its inputs, or fakes of them.
            static_inputs: Positions of inputs that are the same tensors at every call, such as
                parameters: they are never copied. None takes them from AOTAutograd's metadata where
                it compiles the graph; else they are the inputs that are parameters.
            **options: Options of ``capture``, as for the backend.

        Returns:
            A function of the same inputs; its ``reset()`` releases the graphs.

        Raises:
            GraphError: An argument is wrong.
        """
        checked = capture_options(options)
        why = check_graph("graph.backend.apply", gm, example_inputs, runs_graph=True)
        if static_inputs is None:
            static_inputs = static_positions(gm, example_inputs)
        check_static(static_inputs, example_inputs)
        region = Region(_name_of(gm), checked, runs_graph=True)
        lost = None if why else lost_write(gm)
        if lost is not None and lost.always:
            why = lost.reason
        if why is not None:
            region.run_eagerly(gm, why, example_inputs)
            return region

        def as_it_is(part: GraphModule, values: Sequence[Any], name: str) -> Code:
            plain = with_plain_effects(part)  # a capture sees its operators
            region.followers += follower(part, plain) if plain is not part else []
            return lambda args: plain(*args)

        run = region.partition(gm, example_inputs, static_inputs, "graph", as_it_is)

        usual = None if lost is None else layouts(_values(gm, example_inputs))

        def call(*args: Any) -> Any:
            why = None if lost is None else _why_lost(lost, _values(gm, args), usual)
            if why is not None:
                region.note_eager(why)
                return gm(*args)
            return run([*args])

        region.hold(call, static_inputs, example_inputs, gm if has_attributes(gm) else None)
        return region


backend = CompileBackend()


def _is_wrapper(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and is_traceable_wrapper_subclass(x)


def _values(gm: GraphModule, args: Sequence[Any]) -> list[Any]:
    """Return the arguments of a call, and the parameters and buffers of the graph."""
    return [*args, *gm.parameters(), *gm.buffers()]


def _why_lost(lost: Lost, values: Sequence[Any], usual: Any) -> str | None:
    """Return why a call would lose a write; None for one like the examples, without a backward."""
    tensors = (x for x in values if isinstance(x, torch.Tensor))
    goes_back = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if lost.with_gradients and goes_back:
        return lost.reason
    if layouts(values) != usual:
        return f"{lost.reason}; its inputs have other shapes or strides than the examples"
    return None


def _name_of(gm: GraphModule) -> str:
    """Return what a graph is called in reports: torch's number of compiled code, and its line."""
    number = gm.meta.get("dynamo_compile_id")
    if number is None:
        return type(gm).__name__
    traces = (node.meta.get("stack_trace") or "" for node in gm.graph.nodes)
    match = next(filter(None, map(_LINE.search, traces)), None)
    location = "" if match is None else f" ({match[3]} at {Path(match[1]).name}:{match[2]})"
    return f"compiled code {number}{location}"
