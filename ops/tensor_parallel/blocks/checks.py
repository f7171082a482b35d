"""Checks of the tensors and options of a tensor-parallel block, on this rank, before any launch."""

import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from commlib.core.context import CommContext
from commlib.core.group import needs_result
from commlib.core.manager import comm
from commlib.core.validation import check_tensor
from commlib.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from commlib.ops.agreement import Fact, check_ranks_agree
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.registered.library import needs_op
from commlib.ops.tensor_parallel.column_linear import NO_RING, autocast_dtype
from commlib.streams import sees_capture

Tensor = torch.Tensor
Shape = tuple[int, ...]

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Expected(NamedTuple):
    """The shape that a tensor must have, and what it holds."""

    shape: Shape
    meaning: str


class BlockChecks:
    """The checks of one call of a block: they name the operator, the rank and the ring."""

    def __init__(self, name: str, ring: Ring) -> None:
        """Look up the ring; raises ``RingError``. ``ring=-1`` is one rank without a ring."""
        self.name = name
        self.ring_id = ring_number(name, ring)
        # Compiled code looks the ring up when it runs.
        alone = self.ring_id == NO_RING or torch.compiler.is_compiling()
        self.ring: CommContext | None = None if alone else comm(self.ring_id)
        if self.ring is not None:
            needs_result(self.ring, name)

    @property
    def where(self) -> str:
        """The start of an error text."""
        if self.ring_id == NO_RING:
            return f"{self.name} on one rank (ring_id={NO_RING})"
        return comm(self.ring_id)._describe(self.name)

    def number(self, role: str, value: Any, most: float) -> None:
        """Raise unless ``value`` is a number from 0 to ``most``."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and 0 <= value <= most and value < math.inf:
            return
        limit = "" if most == math.inf else f" to {most:g}"
        raise ArgumentError(
            f"{self.where}: {role}={value!r}; expected a number from 0{limit}; pass {role}=0.0"
        )

    def generators(self, x: Tensor, *, draws: bool) -> None:
        """With FLAGS_comm_check=2 raise on every rank if their dropout masks would differ."""
        ring = self.ring
        if ring is None or not (draws and ring._compares) or needs_op(x) or sees_capture(x):
            return
        state = torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()
        digest = zlib.crc32(state.numpy().tobytes())
        check_ranks_agree(ring, self.name, [Fact("state of the default generator", digest)])

    def hidden(self, x: Tensor) -> None:
        """Raise unless ``x`` is [batch, tokens, width] of a float dtype."""
        self.readable("x", x, None)
        if x.dim() != 3:
            raise ShapeError(
                f"{self.where}: x has shape {tuple(x.shape)}; expected [batch, tokens, width]; "
                f"pass x.view(batch, tokens, width)"
            )
        if x.dtype not in DTYPES:
            raise DtypeError(
                f"{self.where}: x is {x.dtype}; expected float64, float32, float16 or bfloat16; "
                f"pass x.float()"
            )

    def weight(self, role: str, weight: Tensor, x: Tensor, dims: str) -> Shape:
        """Return the shape of a weight that has as many dims as ``dims`` names."""
        self.readable(role, weight, x.device)
        if weight.dim() != len(dims.split(",")):
            raise ShapeError(
                f"{self.where}: {role} has shape {tuple(weight.shape)}; expected [{dims}], this "
                f"rank's part"
            )
        return tuple(weight.shape)

    def tensors(
        self, x: Tensor, tensors: Mapping[str, tuple[Tensor | None, Expected]], norm: str
    ) -> None:
        """Raise for a tensor of another shape, dtype or device; None is skipped.

        ``norm``: the prefix of parameters of the layer norm, which may be float32.
        """
        for role, (tensor, expected) in tensors.items():
            if tensor is None:
                continue
            self.readable(role, tensor, x.device)
            if tuple(tensor.shape) != expected.shape:
                raise ShapeError(
                    f"{self.where}: {role} has shape {tuple(tensor.shape)}; expected "
                    f"{expected.shape}, {expected.meaning}"
                )
            self._dtype(role, tensor, x, wide=role.startswith(norm))

    def _dtype(self, role: str, tensor: Tensor, x: Tensor, *, wide: bool) -> None:
        allowed = [x.dtype, *([torch.float32] if wide else [])]
        if autocast_dtype(x.device) is not None:
            allowed = [torch.float32, torch.float16, torch.bfloat16]
        if tensor.dtype not in allowed:
            raise DtypeError(
                f"{self.where}: {role} is {tensor.dtype} and x is {x.dtype}; expected "
                f"{' or '.join(map(str, allowed))}; pass {role}.to({x.dtype}), or use "
                f"torch.autocast for mixed precision"
            )

    def readable(self, role: str, tensor: Tensor, device: torch.device | None) -> None:
        """Raise unless ``tensor`` is a tensor on the device of the ring, or of ``x``."""
        if self.ring is not None:
            check_tensor(self.ring, self.name, role, tensor)
        elif not isinstance(tensor, torch.Tensor):
            raise ArgumentError(
                f"{self.where}: {role} is {type(tensor).__name__}; expected a torch.Tensor"
            )
        elif device is not None and tensor.device != device:
            raise DeviceError(
                f"{self.where}: {role} is on {tensor.device} and x is on {device}; pass "
                f"{role}.to('{device}')"
            )
