"""The settings of the LAMB optimizer, and their checks."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from commlib.core.context import CommContext
from commlib.core.validation import check_tensor
from commlib.errors import ArgumentError, DtypeError
from commlib.ops.agreement import Fact
from commlib.ops.lamb.lamb_rings import NAME

LOW = (torch.float16, torch.bfloat16)


class Settings(NamedTuple):
    """The settings of all parameters, the same on every rank.

    Attributes:
        max_grad_norm: Limit of the global norm; 0 for none.
        clip_after_allreduce: True limits the norm of the sum, False that of each rank's gradient.
        is_grad_scaled_by_nranks: True if the loss was divided by the number of ranks.
        accumulation_steps: Microbatches per update.
        use_master_acc_grad: True adds microbatches in float32.
        use_master_param_norm: True takes norms of float32 master weights.
    """

    max_grad_norm: float
    clip_after_allreduce: bool
    is_grad_scaled_by_nranks: bool
    accumulation_steps: int
    use_master_acc_grad: bool
    use_master_param_norm: bool

    def check(self, ring: CommContext) -> None:
        """Raise ``ArgumentError`` if a setting is out of range."""
        _check(ring, "max_grad_norm", self.max_grad_norm, "a number >= 0", self.max_grad_norm >= 0)
        steps = self.accumulation_steps
        valid = isinstance(steps, int) and steps >= 1
        _check(ring, "gradient_accumulation_steps", steps, "a whole number >= 1", valid)


def check_group(ring: CommContext, number: int, group: dict[str, Any]) -> None:
    """Raise ``ArgumentError`` if a setting of a parameter group is out of range.

    A learning rate in a tensor is not read.
    """
    rate, betas, eps, decay = (group[name] for name in ("lr", "betas", "eps", "weight_decay"))
    where = f"of group {number}"
    if isinstance(rate, torch.Tensor):
        _check(ring, f"lr {where}", tuple(rate.shape), "a tensor of one element", rate.numel() == 1)
    else:
        _check(ring, f"lr {where}", rate, "a number >= 0", rate >= 0)
    _check(ring, f"weight_decay {where}", decay, "a number >= 0", decay >= 0)
    _check(ring, f"eps {where}", eps, "a number > 0", eps > 0)
    valid = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
    _check(ring, f"betas {where}", betas, "two numbers in [0, 1)", valid)


def common_moments(
    ring: CommContext, groups: Sequence[dict[str, Any]]
) -> tuple[tuple[float, float], float]:
    """Return betas and eps, which all parameter groups share.

    Raises:
        ArgumentError: Two groups differ.
    """
    found = [(tuple(map(float, group["betas"])), float(group["eps"])) for group in groups]
    for number, (betas, eps) in enumerate(found):
        if (betas, eps) != found[0]:
            raise ArgumentError(
                f"{ring._describe(NAME)}: group {number} has betas={betas}, eps={eps}; expected "
                f"betas={found[0][0]}, eps={found[0][1]} of group 0, because all parameters share "
                f"them; create one optimizer per setting"
            )
    (first, second), eps = found[0]
    return (first, second), eps


def check_params(ring: CommContext, params: Sequence[torch.Tensor]) -> None:
    """Raise an error if a parameter can't be part of a flat buffer of this ring.

    Raises:
        ArgumentError: There are no parameters, or one does not require grad.
        DeviceError: A parameter is not plain memory on the device of the ring.
        DtypeError: A dtype is not supported, or both 16-bit dtypes occur.
    """
    prefix = ring._describe(NAME)
    if not params:
        raise ArgumentError(f"{prefix}: no parameters; expected one or more; pass params=")
    for number, param in enumerate(params):
        check_tensor(ring, NAME, f"parameter {number}", param)
        if param.dtype not in (torch.float32, *LOW):
            raise DtypeError(
                f"{prefix}: parameter {number} is {param.dtype}; expected torch.float32, "
                f"torch.float16 or torch.bfloat16; call model.float()"
            )
        if not param.requires_grad:
            raise ArgumentError(
                f"{prefix}: parameter {number} does not require grad; expected one that does; "
                f"pass [p for p in model.parameters() if p.requires_grad]"
            )
    low = {p.dtype: number for number, p in enumerate(params) if p.dtype in LOW}
    if len(low) > 1:
        given = ", ".join(f"parameter {number} is {dtype}" for dtype, number in low.items())
        raise DtypeError(
            f"{prefix}: {given}; expected one 16-bit dtype; cast the model to one of them"
        )


def facts(
    settings: Settings, params: Sequence[torch.Tensor], moments: Iterable[float], shards: int
) -> list[Fact]:
    """Return what must be the same on every rank."""
    shapes = hash(tuple(tuple(p.shape) for p in params))
    low = next((p.dtype for p in params if p.dtype in LOW), torch.float32)
    named = [Fact(f"setting {name}", value) for name, value in settings._asdict().items()]
    return [
        Fact("number of parameters", len(params), ArgumentError),
        Fact("16-bit dtype of parameters", low, DtypeError),
        Fact("parameters of 16 bits", sum(p.dtype in LOW for p in params)),
        Fact("elements of all parameters", sum(p.numel() for p in params)),
        Fact("hash of the parameters' shapes", shapes),
        Fact("size of shard_ring", shards),
        *(Fact("betas and eps", value) for value in moments),
        *named,
    ]


def decayed(
    params: Sequence[torch.Tensor], exclude: Callable[[torch.Tensor], bool] | None
) -> list[bool]:
    """Return per parameter whether weight decay applies to it."""
    return [exclude is None or not exclude(param) for param in params]


def _check(ring: CommContext, name: str, given: object, expected: str, valid: bool) -> None:
    if not valid:
        raise ArgumentError(
            f"{ring._describe(NAME)}: {name} is {given!r}; expected {expected}; pass such a value"
        )
