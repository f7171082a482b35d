"""Inductor's code for a graph, each partition of which is one operator to a capture."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import GraphModule, Node

from commlib.graph.compiled.called import calls
from commlib.graph.compiled.region import Code, Region
from commlib.graph.compiled.static_positions import effect_tokens, static_positions
from commlib.graph.operators.compiled_code import CompiledCode

_SEEDED = torch.Tag.nondeterministic_seeded
# A cached result would be Inductor's own code, which no capture sees; its cache of code stays on.
# The backward is compiled at once: whether it is cut decides how the forward is captured.
_AOT = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}


def compile_region(
    gm: GraphModule, example_inputs: Sequence[Any], settings: dict[str, Any], region: Region
) -> Callable[..., Any]:
    """Compile a graph with Inductor; ``region`` is given each partition.

    Args:
        gm: The graph of Dynamo, which this takes over.
        example_inputs: Its inputs, or fakes of them.
        settings: Settings of Inductor by name.
        region: Cuts partitions where no graph of the device can hold all of them.
    """
    from torch._functorch import config as aot  # slow to import
    from torch._inductor.compile_fx import compile_fx

    partitions: Any = _Partitions(region)
    with aot.patch({name: on for name, on in _AOT.items() if hasattr(aot, name)}):
        compiled: Any = compile_fx(gm, example_inputs, partitions, config_patches=settings)
    code: Callable[..., Any] = compiled
    return code


class _Partitions:
    """The compiler of partitions that AOTAutograd calls."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._tokens = 0  # that the forward was traced with

    def __call__(self, gm: GraphModule, values: Sequence[Any], **how: Any) -> Code:
        """Compile a partition; ``how``: options of it for Inductor."""
        from torch._inductor.compile_fx import compile_fx_inner

        def compile_part(part: GraphModule, values: Sequence[Any], name: str) -> Code:
            writes, draws = _written(part), _draws(part)
            # AOTAutograd asks for the strides of the results of all of it, which a cut graph keeps.
            with nullcontext() if part is gm else TracingContext.report_output_strides():
                run = compile_fx_inner(part, values, **how)
            return CompiledCode(name, run, writes=writes, draws=draws).call

        _keep_saved()
        kind = "backward" if how.get("is_backward") else "forward"
        how.pop("static_input_idxs", None)  # for Inductor's own graphs
        if kind == "forward":
            self._tokens = effect_tokens(gm)
        static = static_positions(gm, values, self._tokens)
        run = self._region.partition(gm, values, static, kind, compile_part)
        return _boxed(run)


def _keep_saved() -> None:
    """Keep what the forward has saved: the backward may run again, with other gradients."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _boxed(run: Code) -> Code:
    """Mark a function as one that gets its arguments in a list."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _written(gm: GraphModule) -> list[int]:
    """Return the positions of the inputs that a graph writes to.

    Wrapped operators write to clones, and a ``copy_`` at the end of the graph to its inputs.
    """
    places = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    positions = set[int]()
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for argument, value in zip(getattr(schema, "arguments", ()), node.args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes and isinstance(value, Node) and value in places:
                positions.add(places[value])
    return sorted(positions)


def _draws(gm: GraphModule) -> bool:
    """Return True if a graph draws random numbers from torch's own generator."""
    every = (call for node in gm.graph.nodes for call in calls(gm, node))
    return any(_SEEDED in getattr(call.op, "tags", ()) for call in every)
