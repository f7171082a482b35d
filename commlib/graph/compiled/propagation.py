"""Examples of what each node of an FX graph gives and writes, from a run on fakes."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from commlib.graph.compiled.thread_modes import restored_modes

WRITES = "commlib_writes"  # the key of a node's ``meta`` with the memory that it writes to


class NodeFailed(Exception):
    """A node that fakes can't run.

    Attributes:
        node: The node.
        error: Its error.
    """

    def __init__(self, node: Node, error: Exception) -> None:
        super().__init__()
        self.node, self.error = node, error

    @property
    def reason(self) -> str:
        """Return which node it is, and the first line of its error."""
        headline = next(iter(str(self.error).splitlines()), "")
        return f"{self.node.name}: {type(self.error).__name__}: {headline}"


def propagate(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Note at each node what it gives and writes; the graph's own tensors stay as they are.

    Raises ``NodeFailed``; the nodes have no more notes than before then.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # loads sympy

    mode = detect_fake_mode(example_inputs) or FakeTensorMode(
        allow_non_fake_inputs=True, shape_env=ShapeEnv()
    )
    placeholders = gm.graph.find_nodes(op="placeholder")
    fakes = [_input(mode, node, x) for node, x in zip(placeholders, example_inputs, strict=True)]
    before = {node: dict(node.meta) for node in gm.graph.nodes}
    try:
        with restored_modes():
            _run(_Propagation(gm, mode), fakes)
    except Exception:
        for node, meta in before.items():
            node.meta.clear()
            node.meta.update(meta)
        raise


def _run(propagation: FakeTensorProp, fakes: Sequence[Any]) -> None:
    try:
        propagation.propagate_dont_convert_inputs(*fakes)
    finally:
        while propagation.env:  # a value may be a mode, which ends with it
            propagation.env.popitem()


def _input(mode: FakeTensorMode, node: Node, value: Any) -> Any:
    try:
        is_tensor = isinstance(value, torch.Tensor)
        return mode.from_tensor(value, static_shapes=True) if is_tensor else value
    except Exception as error:
        raise NodeFailed(node, error) from error


def storages(value: Any) -> set[int]:
    """Return the memory of the tensors in an example of a value."""
    tensors = (x for x in tree_leaves(value) if isinstance(x, torch.Tensor))
    return {x.untyped_storage()._cdata for x in tensors if x.layout is torch.strided}


def shared(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments whose memory an operator writes to or returns, as its schema says."""
    return [value for value, _ in _aliased(schema, args, kwargs)]


def written(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to, as its schema says."""
    return [value for value, is_write in _aliased(schema, args, kwargs) if is_write]


def _aliased(
    schema: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[Any, bool]]:
    for i, argument in enumerate(getattr(schema, "arguments", ())):
        if argument.alias_info is not None:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield value, argument.alias_info.is_write


class _Propagation(FakeTensorProp):
    """A run on fakes of the inputs, parameters and buffers."""

    def run_node(self, n: Node) -> Any:
        """Run a node, and note what it writes."""
        try:
            with _Writes() as writes:
                result = super().run_node(n)
        except Exception as error:
            raise NodeFailed(n, error) from error
        n.meta[WRITES] = writes.storages
        return result

    def fetch_attr(self, target: str) -> Any:
        """Return a fake of a tensor of the graph."""
        value = super().fetch_attr(target)
        return self._fake(value) if isinstance(value, torch.Tensor) else value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module with fakes of its parameters and buffers."""
        module = self.fetch_attr(target)
        if isinstance(module, torch.jit.ScriptModule):  # its parts can't be replaced
            return module(*args, **kwargs)
        every = {"remove_duplicate": False}
        named = chain(module.named_parameters(**every), module.named_buffers(**every))
        fakes = {name: self._fake(x) for name, x in named}
        return functional_call(module, fakes, args, kwargs, tie_weights=False)

    def _fake(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, FakeTensor):
            return x
        fake: torch.Tensor = self._mode.from_tensor(x, static_shapes=True)
        return fake


class _Writes(TorchDispatchMode):
    """A mode that notes the memory to which operators write."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = set[int]()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note what an operator writes to, and run it."""
        self.storages |= storages(written(getattr(func, "_schema", None), args, kwargs or {}))
        return func(*args, **(kwargs or {}))
