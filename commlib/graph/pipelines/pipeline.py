"""`pipeline`: a list of layers as one module, captured in the longest stretches possible."""

from collections.abc import Sequence
from typing import Any

import torch

from commlib.graph.calls.graph_break import REPLAYS, graph_break
from commlib.graph.captured_module import CapturedModule
from commlib.graph.options import Gradients, Options
from commlib.graph.pipelines.cut import Cuts, Stretch
from commlib.graph.pipelines.layers import Layer, Layers


def pipeline(
    layers: Sequence[Layer],
    *,
    slots: int | None = None,
    breaks: Sequence[int | type] = (),
    shared: Sequence[torch.nn.Module] = (),
    gradients: Gradients = "accumulate",
) -> "Pipeline":
    """Return a module that calls ``layers`` one after the other, most of them from graphs.

    Neighbouring layers are captured together. Graphs end at layers that stay eager: ``shared``
    ones, those marked with ``graph.eager``, and those that capture does not support, which are
    found at the first calls. Each microbatch between its forward and its backward has one slot;
    backwards may come in any order. Slots are used again, so the number of microbatches may
    change at any time. Another shape, or ``eval()``, is another kind of call with its own graphs.

    Args:
        layers: Modules or functions. The first gets the arguments of the call, each later one the
            result of the layer before it.
        slots: Microbatches that may be between forward and backward at the same time. All slots
            are captured at the first call, and a forward beyond them runs eagerly. None: one more
            slot is captured whenever more microbatches are under way than ever before.
        breaks: Where a new graph begins: positions of layers, 1 to ``len(layers) - 1``, or types of
            layers. These layers are captured too.
        shared: Modules that other stages also have, such as tied embeddings. Layers that are or
            use one stay eager. Weights that several stretches on this rank use are found anyway.
        gradients: As for ``capture``. With "accumulate" a weight that the loss uses too, outside of
            the layers, has the sum of another order in its last digits; "copy" has eager code's.

    Returns:
        A module with the state dict of ``torch.nn.Sequential(*layers)``.

    Raises:
        GraphError: An argument is wrong.
    """
    return Pipeline(layers, slots=slots, breaks=breaks, shared=shared, gradients=gradients)


class Pipeline(Layers):
    """The module that ``pipeline`` returns.

    Attributes:
        stretches: How the layers are cut at present.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        slots: int | None = None,
        breaks: Sequence[int | type] = (),
        shared: Sequence[torch.nn.Module] = (),
        gradients: Gradients = "accumulate",
    ) -> None:
        """See ``pipeline``."""
        super().__init__(layers)
        self._options = Options(
            inputs="copy", outputs="copy", gradients=gradients, on_fail="eager", slots=slots
        )
        self._cuts = Cuts(self._layers, breaks, shared)
        self._probed: set[int] = set()  # layers that the next call tries one by one
        self._tried: set[int] = set()  # layers that were
        self._refused: dict[int, CapturedModule] = {}  # eager layers, with the reason
        self.stretches: list[Stretch] = []
        self._calls: list[Layer] = []
        self._cut()

    @graph_break(REPLAYS)
    def forward(self, *args: Any) -> Any:
        """Call the layers; new kinds of calls are captured, known ones replayed.

        Args:
            *args: The arguments of the first layer.

        Returns:
            The result of the last layer.
        """
        self._check_children()
        for call in self._calls:
            args = (call(*args),)
        if self._probed or any(map(_has_failed, self._calls)):
            self._cut_around_failures()
        return args[0]

    @property
    def captured(self) -> list[CapturedModule]:
        """Return the captured stretches, for ``graph.report``."""
        return [call for call in self._calls if isinstance(call, CapturedModule)]

    @property
    def uncaptured(self) -> list[CapturedModule]:
        """Return the layers that can't be captured, with the reasons, for ``graph.report``."""
        return [*self._refused.values()]

    def reset(self) -> None:
        """Release every graph, and forget failures; the next calls capture again."""
        for call in self.captured:
            call.reset()
        self._cuts.forget()
        self._refused.clear()
        self._probed, self._tried = set(), set()
        self._cut()

    def extra_repr(self) -> str:
        """Return the stretches."""
        return ", ".join(map(str, self.stretches))

    def _cut(self) -> None:
        """Make what calls each stretch; those that are as before keep their graphs."""
        old_calls = dict(zip(self.stretches, self._calls, strict=True))
        self.stretches = self._cuts.stretches(self._probed)
        self._calls = [old_calls.get(each) or self._call_of(each) for each in self.stretches]

    def _call_of(self, stretch: Stretch) -> Layer:
        layers = self._layers[stretch.start : stretch.stop]
        if stretch.eager:
            return layers[0]
        return CapturedModule(Layers(layers, name=str(stretch)), self._options)

    def _cut_around_failures(self) -> None:
        """Find the layers that can't be captured: try those of a stretch one by one.

        The next call joins the others again. Layers that fail together once more stay apart. All
        ranks of a ring find the same, because a capture with collectives fails on all of them.
        """
        calls = zip(self.stretches, self._calls, strict=True)
        pairs = [(stretch, call) for stretch, call in calls if _has_failed(call)]
        failed = [stretch.layers for stretch, _ in pairs]
        together = {i for layers in failed if len(layers) > 1 for i in layers}
        alone = {stretch.start: call for stretch, call in pairs if len(stretch.layers) == 1}
        self._refused |= {i: x for i, x in alone.items() if isinstance(x, CapturedModule)}
        self._cuts.eager.update(alone)
        self._cuts.apart |= together & self._tried
        self._probed = together - self._cuts.apart
        self._tried |= together
        self._cut()


def _has_failed(call: Layer) -> bool:
    """Return True if a kind of call has no graph: the capture failed, or a replay differed.

    A further slot that could not be captured, maybe for want of memory, leaves the others.
    """
    return isinstance(call, CapturedModule) and not call.eager.keys() <= call.entries.keys()
