"""A region that was compiled: its code, captured as a whole or in the parts that it is cut into."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace as with_other
from typing import Any

from torch.fx import GraphModule

from commlib.errors import GraphError
from commlib.graph.calls.graph_break import REPLAYS, graph_break
from commlib.graph.captured_function import CapturedFunction
from commlib.graph.compiled.live_attributes import follower, has_attributes
from commlib.graph.compiled.parts import reasons, replace, split
from commlib.graph.compiled.static_inputs import StaticInputs
from commlib.graph.options import Options
from commlib.log import log

Code = Callable[[list[Any]], Any]  # gets a list of arguments, which it may empty
Compile = Callable[[GraphModule, Sequence[Any], str], Code]  # a graph, examples, a name

regions: "weakref.WeakSet[Region]" = weakref.WeakSet()


class Region:
    """A function that replays compiled code.

    Where no partition is cut, forward and backward are one captured call, with slots for forwards
    that wait for their backward. Where one is, each part that a graph can hold is captured alone.

    Attributes:
        name: What it is called in reports.
        cuts: Which partitions are cut, and why.
        followers: Called before each call, to give copies of a graph its attributes.
    """

    def __init__(self, name: str, options: Options, *, runs_graph: bool = False) -> None:
        """``runs_graph``: its code runs the FX graph, whose attributes may be replaced."""
        self._runs_graph = runs_graph
        self.followers = list[Callable[[], None]]()
        self.name, self.cuts = name, list[tuple[str, str]]()
        self._options = options
        self._parts: list[StaticInputs] = []
        self._whole: StaticInputs
        self._code: Callable[..., Any]
        regions.add(self)

    def hold(
        self,
        code: Callable[..., Any],
        static: Sequence[int],
        examples: Sequence[Any],
        module: GraphModule | None = None,
    ) -> None:
        """Record the code of all partitions: ``static`` of its inputs stay; it uses ``module``."""
        self._code = code
        self._whole = StaticInputs(code, static, examples, self.name, self._options, module)

    def run_eagerly(self, code: Callable[..., Any], reason: str, examples: Sequence[Any]) -> None:
        """Run all of a graph eagerly, for a reason that the report has."""
        self.hold(code, (), examples)
        self.note_eager(reason)

    def note_eager(self, reason: str) -> None:
        """Note why calls run eagerly. Raises ``GraphError`` where the program asks for an error."""
        if self._options.on_fail == "raise":
            raise GraphError(f"{self.name} can't be captured: {reason}")
        if (self.name, reason) not in self.cuts:
            self.cuts.append((self.name, reason))
            log.once("%s runs eagerly: %s", self.name, reason)

    @graph_break(REPLAYS)
    def __call__(self, *args: Any) -> Any:
        """Replay the code, or run it to capture it."""
        for follow in self.followers:
            follow()
        return self._code(*args) if self.cuts else self._whole(*args)

    def __repr__(self) -> str:
        cuts = f", cut in {len(self.cuts)} places" if self.cuts else ""
        return f"<Region {self.name}: {len(self.captured)} captured functions{cuts}>"

    @property
    def captured(self) -> list[CapturedFunction[..., Any]]:
        """Return the captured functions: of all of it, or of its parts."""
        return [one for part in (self._whole, *self._parts) for one in part.captured]

    def reset(self) -> None:
        """Release every graph; the next calls capture again."""
        for part in (self._whole, *self._parts):
            part.reset()

    def partition(
        self,
        gm: GraphModule,
        values: Sequence[Any],
        static: Sequence[int],
        kind: str,
        compile_part: Compile,
    ) -> Code:
        """Compile a partition, such as the forward or the backward.

        Args:
            gm: Its graph.
            values: Examples of its inputs.
            static: Positions of the inputs that stay where they are.
            kind: What it is called in reports.
            compile_part: Compiles all of it, or a part.
        """
        name = f"{self.name} {kind}"
        why = reasons(gm)
        if not why:
            return self._alone(compile_part(gm, values, name), static, values, name)
        self.cuts += [(name, each) for each in why]
        log.once("%s runs eagerly between its graphs: %s", name, "; ".join(why))
        split_gm, parts = split(gm)
        if self._runs_graph:
            self.followers += follower(gm, split_gm, *(part.module for part in parts))
        stay = set(static)
        for number, part in enumerate(parts):
            if part.why is not None:
                continue
            label = f"{name}, part {number}"
            positions = [i for i, source in enumerate(part.sources) if source in stay]
            code = compile_part(part.module, part.values, label)
            module = part.module if self._runs_graph and has_attributes(part.module) else None
            run = self._alone(code, positions, part.values, label, module)
            replace(split_gm, part, run)
        return lambda args: split_gm(*_taken(args))

    def _alone(
        self,
        code: Code,
        static: Sequence[int],
        examples: Sequence[Any],
        name: str,
        module: GraphModule | None = None,
    ) -> Code:
        """Return code that is captured alone where the region is cut.

        Its results are copies then: a backward may read them after further forwards.
        """
        options = with_other(self._options, outputs="copy")
        captured = StaticInputs(
            lambda *args: code([*args]), static, examples, name, options, module
        )
        self._parts.append(captured)
        return lambda args: captured(*_taken(args)) if self.cuts else code(args)


def _taken(args: list[Any]) -> tuple[Any, ...]:
    """Return the arguments and empty their list, so that each can be freed after its last use."""
    values = tuple(args)
    args.clear()
    return values
