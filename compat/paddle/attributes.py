"""Calls in the attribute style: tensors first, then pairs of an attribute's name and its value.

Paddle's own layers call ``_legacy_C_ops.c_identity(x, "use_calc_stream", True, "ring_id", 0)``.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType, NoneType
from typing import Any

import torch

from commlib.compat.paddle.outputs import WITH_OUTPUTS, call_with_outputs
from commlib.errors import ArgumentError

# Attributes of every legacy operator, for Paddle's own passes.
_OF_PADDLE = {
    *("op_role", "op_role_var", "op_namescope", "op_callstack", "op_device", "with_quant_attr"),
}
# Accepted without effect. An operator without ``ring_id`` does not communicate, one without
# ``use_calc_stream`` runs on the current stream.
_WITHOUT_EFFECT = {"ring_id", "use_calc_stream"}
_WITHOUT_EFFECT_IN = {
    "coalesce_tensor": {"user_defined_size_of_dtype"},
    "p_send_array": {"dynamic_shape"},
}


class AttributeCalls:
    """The operators of ``dialect`` in the attribute style."""

    def __init__(self, dialect: ModuleType) -> None:
        self._dialect = dialect

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the operator ``name``; the dialect's error names the nearest one."""
        return partial(self._call, name, getattr(self._dialect, name))

    def _call(self, name: str, operator: Callable[..., Any], *arguments: Any) -> Any:
        tensors, attributes = _split(name, arguments)
        signature = inspect.signature(operator)
        attributes = _known(name, signature, attributes)
        if name == "random_routing":  # upstream's operator has the inputs in the reverse order
            tensors = tensors[::-1]
        in_place = getattr(self._dialect, f"{name}_", operator)
        if name in WITH_OUTPUTS and len(tensors) > 1:
            return call_with_outputs(name, operator, in_place, tensors, attributes)
        needed = [each for each in signature.parameters if each not in attributes]
        if len(tensors) == 2 and tensors[0] is tensors[1] and needed[:1] == ["x"]:
            operator, tensors = in_place, tensors[:1]
        try:
            signature.bind(*tensors, **attributes)
        except TypeError as error:
            raise ArgumentError(
                f"{name}: {len(tensors)} tensors before the attributes ({error}); expected the "
                f"inputs of the operator, or its input twice for the form in place"
            ) from error
        return operator(*tensors, **attributes)


def _known(name: str, signature: inspect.Signature, attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that are arguments, without those that have no effect."""
    names = signature.parameters
    unused = _WITHOUT_EFFECT | _WITHOUT_EFFECT_IN.get(name, set())
    unknown = [each for each in attributes if each not in names and each not in unused]
    if unknown:
        raise ArgumentError(f"{name}: attribute {unknown[0]!r}; expected one of {', '.join(names)}")
    return {key: value for key, value in attributes.items() if key in names}


def _split(name: str, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the tensors before the first attribute's name, and the attributes."""
    first = next((i for i, each in enumerate(arguments) if isinstance(each, str)), len(arguments))
    tensors, pairs = arguments[:first], arguments[first:]
    if len(pairs) % 2 or not all(isinstance(each, str) for each in pairs[::2]):
        raise ArgumentError(
            f"{name}: arguments {pairs!r} after the tensors; expected pairs of an attribute's name "
            f"and its value; for example 'ring_id', 0"
        )
    wrong = [
        each for each in tensors if not isinstance(each, torch.Tensor | list | tuple | NoneType)
    ]
    if wrong:
        raise ArgumentError(
            f"{name}: {wrong[0]!r} before the first attribute; expected tensors; pass it as an "
            f"attribute, after its name"
        )
    attributes = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return tensors, {key: value for key, value in attributes.items() if key not in _OF_PADDLE}
