"""Facts about an operator of torch from its schema and tags, used at every operator of a run."""

from functools import cache
from typing import Any, NamedTuple

import torch

from commlib.graph.operators.step import leaves_in, tensors_in

_aten = torch.ops.aten
_NO_KERNEL = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
_BY_ARGUMENTS = {  # read the values of all tensors but the first one, though no tag says so
    _aten._pack_padded_sequence.default,
    _aten.quantize_per_tensor.tensor_qparams,
    _aten.quantize_per_tensor.tensors,
}
_BY_VALUES = {*_BY_ARGUMENTS, _aten.quantize_per_tensor_dynamic.default}
_OWN_RANDOM = "dropout_state"  # the random numbers of cuDNN's recurrent networks
_UNSAID = ("running_mean", "running_var", _OWN_RANDOM)  # written, but mostly not by the schema
_LEARNS = ("training", "train")  # arguments with which they are written
_SYNCS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_OWN = ("aten", "prims")
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)

Place = tuple[int, str]  # position and name of an argument


class Facts(NamedTuple):
    """The facts about an operator.

    Attributes:
        text: The operator's name.
        only_views: True if it returns a view and reads no element.
        reshapes: True if it changes the shape of its input in place.
        draws: True if it draws random numbers.
        generator: True if it takes a generator.
        syncs: True if the host waits for a value or a shape.
        waits: True if the host may wait, for a value, a shape or a copy.
        computes: True if it does more than allocate.
        copies: True if it may copy between devices.
        indexed: True if it takes indices, which may be masks.
        takes_memory: True if it creates a tensor from a storage argument.
        lifts: True if it creates a tensor from a literal.
        detaches: True if it is the ``detach`` that torch calls for a saved result.
        writes: Arguments that it writes to.
        lists: True if these are lists, whose writes torch counts only where no mode watches.
        unsaid: Arguments that it writes to if ``learns`` is true or None.
        learns: The argument that selects this.
        own_random: True if it draws from a separate random state, which restarts when torch's
            generator is set.
        own: True if torch defines it, so that it contains no collective.
    """

    text: str
    only_views: bool
    reshapes: bool
    draws: bool
    generator: bool
    syncs: bool
    waits: bool
    computes: bool
    copies: bool
    indexed: bool
    takes_memory: bool
    lifts: bool
    detaches: bool
    writes: tuple[Place, ...]
    lists: bool
    unsaid: tuple[Place, ...]
    learns: Place | None
    own_random: bool
    own: bool


class Described:
    """An operator that is not torch's and brings the facts about itself."""

    facts: Facts


@cache
def facts(func: Any) -> Facts:
    """Return the facts about an operator."""
    arguments = list(func._schema.arguments)
    writes = tuple(
        (i, x.name)
        for i, x in enumerate(arguments)
        if x.alias_info is not None and x.alias_info.is_write
    )
    reads = [(i, x.name) for i, x in enumerate(arguments) if (i, x.name) not in writes]
    tags = set(func.tags)
    syncs = bool(tags & _SYNCS) or func in _BY_VALUES
    copies, indexed = func in _COPIES, func in _INDEXED
    return Facts(
        text=str(func),
        only_views=not writes and any(x.alias_info for x in func._schema.returns),
        reshapes=torch.Tag.inplace_view in tags,
        draws=torch.Tag.nondeterministic_seeded in tags,
        generator=any("Generator" in str(x.type) for x in arguments),
        syncs=syncs,
        waits=syncs or copies or indexed,
        computes=func not in _NO_KERNEL,
        copies=copies,
        indexed=indexed,
        takes_memory=any(str(x.type) == "Storage" for x in arguments),
        lifts=func is _aten.lift_fresh.default,
        detaches=func is _aten.detach.default,
        writes=writes,
        lists=any(str(arguments[i].type) == "List[Tensor]" for i, _ in writes),
        unsaid=tuple(arg for arg in reads if arg[1] in _UNSAID),
        learns=next((arg for arg in reads if arg[1] in _LEARNS), None),
        own_random=any(x.name == _OWN_RANDOM for x in arguments),
        own=func.namespace in _OWN,
    )


def memory(x: torch.Tensor) -> int:
    """Return a key of a tensor's memory; 0 if it is not one storage (sparse)."""
    return x.untyped_storage()._cdata if x.layout is torch.strided else 0


class OpCall:
    """One call of an operator.

    Attributes:
        func: The operator.
        known: The facts about it.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        tensors: All tensors among them.
        memory: The memory keys of its tensors in order.
    """

    __slots__ = ("_leaves", "args", "func", "known", "kwargs", "memory", "tensors")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.known = func.facts if isinstance(func, Described) else facts(func)
        self._leaves = leaves_in(args) + leaves_in(kwargs) if kwargs else leaves_in(args)
        self.tensors = [x for x in self._leaves if isinstance(x, torch.Tensor)]
        self.memory = [  # ``memory``, written out
            x.untyped_storage()._cdata if x.layout is torch.strided else 0 for x in self.tensors
        ]
        if self.known.takes_memory:
            self.memory += [x._cdata for x in self._leaves if isinstance(x, torch.UntypedStorage)]

    @property
    def is_led_by_host(self) -> bool:
        """Return True if all values that the host may need for it are on the host."""
        read = tensors_in(self.args[1:]) if self.func in _BY_ARGUMENTS else self.tensors
        return all(x.is_cpu for x in read)

    @property
    def generators(self) -> list[torch.Generator]:
        """Return the generators that it is given."""
        return [x for x in self._leaves if isinstance(x, torch.Generator)]

    @property
    def written(self) -> list[torch.Tensor]:
        """Return the tensors that it writes to, in its schema or not."""
        op_facts = self.known
        if not (op_facts.writes or op_facts.unsaid):
            return []
        learns = op_facts.learns is None or self._argument(op_facts.learns)
        arguments = [*op_facts.writes, *(op_facts.unsaid if learns else ())]
        return [tensor for arg in arguments for tensor in tensors_in(self._argument(arg))]

    def _argument(self, place: Place) -> Any:
        i, name = place
        return self.args[i] if i < len(self.args) else self.kwargs.get(name)

    def __str__(self) -> str:
        """Return the operator and its arguments that are not tensors."""
        if len(self.tensors) == len(self._leaves):
            return self.known.text
        plain = [repr(x) for x in self._leaves if isinstance(x, _PLAIN)]
        return f"{self.known.text}({', '.join(plain)})"
