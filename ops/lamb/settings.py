"""The settings of the LAMB optimizer, and their checks."""

from collections.abc import Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import Any, NamedTuple

import torch

from commlib.errors import ArgumentError, DtypeError
from commlib.ops.agreement import Fact

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

    def check(self, where: str) -> None:
        """Raise ``ArgumentError`` if a setting is out of range."""
        limit = self.max_grad_norm
        _check(where, "max_grad_norm", limit, "a number >= 0", is_number(limit) and limit >= 0)
        steps = self.accumulation_steps
        valid = type(steps) is int and steps >= 1
        _check(where, "gradient_accumulation_steps", steps, "a whole number >= 1", valid)
        for name in self._fields:
            value = getattr(self, name)
            if name not in ("max_grad_norm", "accumulation_steps"):
                _check(where, name, value, "True or False", isinstance(value, bool))


def is_number(value: object) -> bool:
    """Return True for a finite real number that is not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)


def check_group(where: str, number: int, group: Mapping[str, Any]) -> None:
    """Raise ``ArgumentError`` if a setting of a parameter group is out of range.

    The value of a tensor is not read.
    """
    for name in ("lr", "weight_decay"):
        value, role = group[name], f"{name} of group {number}"
        if isinstance(value, torch.Tensor):
            valid = value.numel() == 1 and value.is_floating_point()
            _check(where, role, (value.dtype, *value.shape), "a tensor of one element", valid)
        else:
            _check(where, role, value, "a number >= 0", is_number(value) and value >= 0)
    betas, eps = group["betas"], group["eps"]
    _check(where, f"eps of group {number}", eps, "a number > 0", is_number(eps) and eps > 0)
    valid = isinstance(betas, tuple | list) and len(betas) == 2
    valid = valid and all(is_number(beta) and 0 <= beta < 1 for beta in betas)
    _check(where, f"betas of group {number}", betas, "two numbers in [0, 1)", valid)


def common_moments(
    where: str, groups: Sequence[Mapping[str, Any]]
) -> tuple[tuple[float, float], float]:
    """Return betas and eps, which all parameter groups share.

    Raises:
        ArgumentError: Two groups differ.
    """
    pairs = [(tuple(map(float, group["betas"])), float(group["eps"])) for group in groups]
    for number, (betas, eps) in enumerate(pairs):
        if (betas, eps) != pairs[0]:
            raise ArgumentError(
                f"{where}: group {number} has betas={betas}, eps={eps}; expected "
                f"betas={pairs[0][0]}, eps={pairs[0][1]} of group 0, because all parameters share "
                f"them; create one optimizer per setting"
            )
    (first, second), eps = pairs[0]
    return (first, second), eps


def facts(
    settings: Settings, groups: Sequence[Mapping[str, Any]], with_decay: Sequence[bool], shards: int
) -> list[Fact]:
    """Return what must be the same on every rank."""
    params = [p for group in groups for p in group["params"]]
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
        *named,
        *group_facts(groups),
        Fact("parameters with weight decay", sum(with_decay)),
        Fact("hash of exclude_from_weight_decay's answers", hash(tuple(with_decay))),
    ]


def group_facts(groups: Sequence[Mapping[str, Any]]) -> list[Fact]:
    """Return what must be the same of parameter groups; tensors are read.

    The number of groups comes first, because the others are compared by their position.
    """
    sizes = hash(tuple(len(group["params"]) for group in groups))
    facts = [Fact("number of parameter groups", len(groups)), Fact("hash of their sizes", sizes)]
    for number, group in enumerate(groups):
        for name in ("lr", "weight_decay"):
            # float32, as the step takes it: a tensor and a number may have the same value.
            value = torch.tensor(float(group[name]), dtype=torch.float32).item()
            facts.append(Fact(f"{name} of group {number}", value))
        moments = (*group["betas"], group["eps"])
        facts += [Fact("betas and eps", float(value)) for value in moments]
    return facts


def _check(where: str, name: str, given: object, expected: str, valid: bool) -> None:
    if not valid:
        raise ArgumentError(f"{where}: {name} is {given!r}; expected {expected}; pass such a value")
