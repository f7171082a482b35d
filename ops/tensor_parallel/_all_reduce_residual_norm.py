"""all_reduce_residual_norm: a sum over the ranks, plus a residual, and its norm."""

import math
from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.core.group import needs_result
from commlib.core.manager import comm
from commlib.core.tensors import dense_copy, is_dense
from commlib.core.validation import check_tensor
from commlib.errors import ArgumentError, DtypeError, ShapeError
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.registered.library import like, register, traced
from commlib.p2p.fused_norm import FLOAT8, Norm

Tensor = torch.Tensor

NAME = "all_reduce_residual_norm"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST = 448.0  # of FLOAT8


def all_reduce_residual_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    ring_id: Ring = 0,
    *,
    norm: str = "rms",
    bias: Tensor | None = None,
    linear_bias: Tensor | None = None,
    eps: float = 1e-06,
    scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_calc_stream: bool = True,
) -> tuple[Tensor, Tensor]:
    """Sum ``x`` over the ring, add a residual, and normalise the rows of the sum.

    z = all_reduce(x) + linear_bias + residual; y is the norm of the rows of z. There is no
    gradient. Source: ``torch.nn.functional.rms_norm`` and ``layer_norm``.

    One kernel does it under three conditions: the ring has push kernels, a row is a multiple of 16
    bytes up to 32 KiB, and the kernel table selects it. Otherwise all_reduce and torch operators do
    it. Both ways give the same z if push kernels do the all_reduce. y may differ in its last bit
    between them.

    Args:
        x: [..., H], this rank's partial sums of a row-parallel linear layer, bfloat16, float16 or
            float32. All other tensors have its dtype, and are the same on every rank.
        residual: The shape of ``x``.
        weight: [H], multiplied with the normalised rows.
        ring_id: The ring, its id or its name.
        norm: "rms": y = z / sqrt(mean(z^2) + eps) * weight. "layer": y = (z - mean) / sqrt(var +
            eps) * weight + bias, with var over H.
        bias: [H], for "layer" only. Default: 0.
        linear_bias: [H], the bias of the linear layer, added once. Default: 0.
        eps: Added to the mean of squares; a finite number >= 0.
        scale: One float32 on the ring's device, read when the call runs; with ``out_dtype`` only.
        out_dtype: ``torch.float8_e4m3fn``: y / scale, rounded to nearest and clamped to ±448.
            Default: the dtype of ``x``.
        use_calc_stream: Sum on the caller's current stream. False: sum on the ring's stream. The
            rest runs on the current stream.

    Returns:
        (y, z), new tensors of the shape of ``x``. The sum is rounded as all_reduce rounds it; z is
        then added up in float32 and rounded once, and so is y. z has the same bits on all ranks.
        The host does not block on a GPU.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError: Before any launch.
        ArgumentError: An option is invalid, a tensor requires grad, or ``ring.group()`` is open.
    """
    ring_id = ring_number("all_reduce_residual_norm", ring_id)
    _check_options(norm, bias, eps, scale, out_dtype, getattr(x, "dtype", None))
    tensors = x, residual, weight, bias, linear_bias, scale
    _check_gradients(tensors)
    named = {"residual": residual, "weight": weight, "bias": bias, "linear_bias": linear_bias}
    traces = traced(NAME, use_calc_stream, True, ring_id, x=x, scale=scale, **named)
    call: Any = _registered_op if traces else _run
    y, z = call(*tensors, ring_id, norm == "layer", float(eps), use_calc_stream)
    return y, z


def _check_options(
    norm: str,
    bias: Tensor | None,
    eps: float,
    scale: Tensor | None,
    out_dtype: torch.dtype | None,
    dtype: torch.dtype | None,
) -> None:
    if norm not in ("rms", "layer"):
        raise ArgumentError(f"{NAME}: norm={norm!r}; expected 'rms' or 'layer'")
    if bias is not None and norm == "rms":
        raise ArgumentError(
            f"{NAME}: bias with norm='rms', which adds none; pass norm='layer', or linear_bias= "
            f"for that of the linear layer"
        )
    is_number = isinstance(eps, (int, float)) and not isinstance(eps, bool)
    if not is_number or not 0 <= eps < math.inf:
        raise ArgumentError(f"{NAME}: eps={eps!r}; expected a number from 0 on; pass eps=1e-6")
    if out_dtype not in (None, FLOAT8, dtype):
        raise DtypeError(
            f"{NAME}: out_dtype={out_dtype}; expected {FLOAT8}, or nothing for that of x, {dtype}"
        )
    if (out_dtype == FLOAT8) != (scale is not None):
        passed = "without scale=" if scale is None else f"with scale=, but out_dtype={out_dtype}"
        raise ArgumentError(
            f"{NAME}: {passed}; expected both or neither; pass out_dtype={FLOAT8}, scale=..., one "
            f"float32 on the ring's device"
        )


def _check_gradients(tensors: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors):
        raise ArgumentError(
            f"{NAME} has no gradient, but one of its tensors requires grad; use "
            f"`with torch.no_grad():`, or pass tensor.detach()"
        )


def _check(ring: CommContext, tensors: tuple[Any, ...]) -> None:
    """Raise for tensors of other dtypes, shapes or devices."""
    x, residual, weight, bias, linear_bias, scale = tensors
    prefix = ring._describe(NAME)
    check_tensor(ring, NAME, "x", x)
    if x.dtype not in DTYPES:
        raise DtypeError(
            f"{prefix}: x is {x.dtype}; expected bfloat16, float16 or float32; pass x.float()"
        )
    if x.dim() == 0:
        raise ShapeError(f"{prefix}: x is 0-D; expected [..., H]; pass x.view(1)")
    _check_like(ring, "residual", residual, x.dtype, tuple(x.shape))
    row = tuple(x.shape[-1:])
    _check_like(ring, "weight", weight, x.dtype, row)
    for name, tensor in (("bias", bias), ("linear_bias", linear_bias)):
        if tensor is not None:
            _check_like(ring, name, tensor, x.dtype, row)
    if scale is not None:
        check_tensor(ring, NAME, "scale", scale)
        if scale.dtype is not torch.float32:
            raise DtypeError(
                f"{prefix}: scale is {scale.dtype}; expected float32; pass scale.float()"
            )
        if scale.numel() != 1:
            raise ShapeError(f"{prefix}: scale has shape {tuple(scale.shape)}; expected one number")


def _check_like(
    ring: CommContext, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    check_tensor(ring, NAME, name, tensor)
    if tensor.dtype is not dtype:
        raise DtypeError(
            f"{ring._describe(NAME)}: {name} is {tensor.dtype} and x is {dtype}; expected one "
            f"dtype; pass {name}.to({dtype})"
        )
    if tuple(tensor.shape) != shape:
        raise ShapeError(
            f"{ring._describe(NAME)}: {name} has shape {tuple(tensor.shape)}; expected {shape}, "
            f"{'that of x' if name == 'residual' else 'the last dimension of x'}"
        )


def _run(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    linear_bias: Tensor | None,
    scale: Tensor | None,
    ring_id: int,
    layer: bool,
    eps: float,
    use_calc_stream: bool,
) -> tuple[Tensor, Tensor]:
    ring, tensors = comm(ring_id), (x, residual, weight, bias, linear_bias, scale)
    _check(ring, tensors)
    needs_result(ring, NAME)
    x, residual, weight, bias, linear_bias, scale = map(_dense, tensors)
    norm = Norm(residual, weight, bias, linear_bias, scale, layer, eps)
    result = ring._all_reduce_norm(x, norm, use_calc_stream=use_calc_stream)
    return composed(ring, x, norm, use_calc_stream) if result is None else result


def _dense(x: Tensor | None) -> Any:
    return x if x is None or is_dense(x) else dense_copy(x)


def composed(
    ring: CommContext, x: Tensor, norm: Norm, use_calc_stream: bool
) -> tuple[Tensor, Tensor]:
    """Return the same from an all_reduce and torch operators: the reference for the kernel."""
    added = like(x)
    ring.all_reduce(added, x, use_calc_stream=use_calc_stream)
    total = added.float()
    if norm.linear_bias is not None:
        total = total + norm.linear_bias.float()
    total = (total + norm.residual.float()).to(x.dtype)
    return _normalised(total, norm), total


def _normalised(total: Tensor, norm: Norm) -> Tensor:
    rows = total.float()
    if norm.layer:
        rows = rows - rows.mean(-1, keepdim=True)
    factor = (rows.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    y = rows * factor * norm.weight.float()
    if norm.bias is not None:
        y = y + norm.bias.float()
    if norm.scale is None:
        return y.to(total.dtype)
    y = y * norm.scale.reshape(()).reciprocal()
    return y.clamp(-LARGEST, LARGEST).to(FLOAT8)


def _fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *others, ring_id, _, _, _ = rest
    _check(comm(ring_id), (x, *others))
    scale = others[-1]
    return x.new_empty(x.shape, dtype=x.dtype if scale is None else FLOAT8), like(x)


_registered_op = register(
    f"{NAME}(Tensor x, Tensor residual, Tensor weight, Tensor? bias, Tensor? linear_bias,"
    f" Tensor? scale, int ring_id, bool layer, float eps, bool use_calc_stream)"
    f" -> (Tensor, Tensor)",
    _run,
    _fake,
)
