"""Cache keys: one hashable key per kind of call of a captured function."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import _C
from torch.backends import mha
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._pytree import TreeSpec, tree_flatten

from commlib.errors import GraphError
from commlib.graph.calls.flattening import Flat, flatten, unflatten
from commlib.graph.calls.key_values import value
from commlib.graph.calls.openable import can_open, held_in, is_hashable
from commlib.graph.python.setting import setting
from commlib.graph.python.user_names import users_own

_DEVICES = ("cuda", "cpu")
_FLAGS_OF_GPUS: Sequence[Callable[[], object]] = ()
if torch.backends.cuda.is_built():
    _FLAGS_OF_GPUS = (
        _C._get_cudnn_enabled,
        _C._get_cudnn_deterministic,
        _C._get_cudnn_benchmark,
        _C._get_cudnn_allow_tf32,
        _C._get_cudnn_sdp_enabled,
        _C._get_mem_efficient_sdp_enabled,
    )
_NOTHING = tree_flatten(((), {}))[1]


@dataclass(slots=True)
class Arguments:
    """The arguments of one call: tensors, and the key of everything but the tensors' contents."""

    tensors: list[torch.Tensor]
    key: tuple[Any, ...]
    leaves: list[Any]
    spec: TreeSpec
    given: tuple[tuple[Any, ...], dict[str, Any]]  # what the caller has passed
    owners: list[torch.Tensor] = field(default_factory=list)  # leaves; their grads end the tensors
    grads: int = 0  # how many tensors these are
    closed: Set[type] = frozenset()  # types of objects that are leaves

    def described(self) -> list[str]:
        """Return each argument in words: its shape and dtype, or its value."""
        return [
            f"{'nested' if x.is_nested else tuple(x.shape)} {x.dtype}"
            if isinstance(x, torch.Tensor)
            else repr(x)[:80]
            for x in map(users_own, self.leaves)
        ]

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs with other tensors in the places of these."""
        others = iter(tensors)
        leaves = [next(others) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        args, kwargs = unflatten(leaves, self.spec)
        return args, kwargs

    def still(
        self, tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Return True if args and kwargs ``rebuilt`` with ``tensors`` hold what they held."""
        leaves, spec, *_ = flatten(args, kwargs, self.closed)
        others = iter(tensors)
        held = [next(others) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        return spec == self.spec and all(x is y for x, y in zip(leaves, held, strict=True))


def _ask_each() -> bool:
    return any(map(torch.is_autocast_enabled, _DEVICES))


# One question in place of one a device, where torch has it: it is asked at every call.
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", _ask_each)


def arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    flat: Flat,
    own: tuple[Any, ...],
    closed: Set[type],
) -> Arguments:
    """Build the key of a call from its leaves.

    ``own``: what the function adds to it; ``closed``: types of objects that are leaves.

    Raises ``GraphError`` for an argument that is neither a tensor nor hashable.
    """
    leaves, spec, shape, contents, _ = flat
    tensors: list[torch.Tensor] = []
    parts: list[Any] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            parts.append(of_tensor(leaf))
        else:
            parts.append(contents[i] if i in contents else value(leaf))
    shared = _shared(tensors) if len(tensors) > 1 else ()
    key = (shape, *parts, shared, *modes(), *own)
    try:
        hash(key)
    except TypeError as error:
        raise GraphError(_without_hash(error, args, kwargs, closed)) from error
    return Arguments(tensors, key, leaves, spec, (args, kwargs), [], 0, closed)


def _without_hash(
    error: TypeError, args: tuple[Any, ...], kwargs: dict[str, Any], closed: Set[type]
) -> str:
    """Return why a call has no key."""
    named = [(f"argument {name!r}" if kwargs else f"argument {name}", x)
             for name, x in (*enumerate(args), *kwargs.items())]  # fmt: skip
    matches = ((name, x, one) for name, x in named for one in held_in(x) if _is_bad(one, closed))
    label, arg, bad = next(matches, ("", None, None))
    if not label:
        return f"what key= returns, or a setting, can't be part of a graph's key ({error})"
    kind = type(bad)
    if isinstance(bad, np.ndarray):
        text, remedy = "an array of NumPy", "pass torch.from_numpy(x), or tuple(x.tolist())"
    elif kind in closed:
        text = f"a {kind.__qualname__}, which has no hash and which the function changes"
        remedy = "return what is new, or define it with dataclass(eq=False)"
    else:
        text = f"a {kind.__qualname__}, which has no hash"
        remedy = "pass the tensors and values in it"
        remedy += "" if is_dataclass(bad) else ", or make its class a dataclass"
    inside = f"{label} is" if arg is bad else f"in {label} is"
    return f"{inside} {text}, and can't be part of a graph's key; {remedy}"


def _is_bad(x: Any, closed: Set[type]) -> bool:
    """Return True for a value that is neither opened nor hashable."""
    kind = type(x)
    is_opened = can_open(kind) and kind not in closed
    return not (is_opened or is_hashable(x if isinstance(x, torch.Tensor) else value(x)))


def without_arguments(key: tuple[Any, ...]) -> Arguments:
    """Return the call without any argument."""
    return Arguments([], key, [], _NOTHING, ((), {}))


def modes() -> tuple[Any, ...]:
    """Return the modes of torch that change the result of a function."""
    now: tuple[object, ...] = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        _C._get_float32_matmul_precision(),
        _C._get_deterministic_algorithms(),
        _C._get_flash_sdp_enabled(),
        _C._get_math_sdp_enabled(),
        mha._is_fastpath_enabled,
    )
    if _FLAGS_OF_GPUS:
        now = (*now, *[ask() for ask in _FLAGS_OF_GPUS])
    if _C._len_torch_function_stack():
        now = (*now, *map(_of_mode, _get_current_function_mode_stack()))
    if not any_autocast():
        return now
    on = (device for device in _DEVICES if torch.is_autocast_enabled(device))
    return (*now, *((device, torch.get_autocast_dtype(device)) for device in on))


def _of_mode(mode: TorchFunctionMode) -> object:
    """Return what tells a mode for functions from another, such as the default device."""
    if type(mode) is DeviceContext:
        return mode.device
    return type(mode), setting(vars(mode), 2)


def of_tensor(x: torch.Tensor) -> tuple[Any, ...]:
    """Return what tells a tensor from another, but for its content and place."""
    wants = x.requires_grad and (2 if x.is_leaf and x.grad is None else 1)
    try:
        return (x.shape, x.dtype, x.device, x.stride() if x.layout is torch.strided else x.layout,
                wants, x.is_conj(), x.is_neg(), type(x) is Parameter)  # fmt: skip
    except RuntimeError:
        if not x.is_nested:
            raise
        return "nested", x.dtype, x.device, wants  # it has no shape, and no graph reads it


def _shared(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return which tensors share an address: the graph has these as one; () if none do."""
    first: dict[int, int] = {}
    try:
        places = [first.setdefault(x.data_ptr(), i) for i, x in enumerate(tensors)]
    except RuntimeError:
        if all(x.layout is torch.strided and not x.is_nested for x in tensors):
            raise  # an output that was overwritten
        return ()  # a sparse tensor has no address: the call is refused by what it is
    return () if len(first) == len(tensors) else tuple(places)
