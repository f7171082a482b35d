"""``moe_gate_dispatch`` and ``moe_combine``: rows of the best experts. They do not communicate."""

import torch

from commlib.errors import ArgumentError, ShapeError

Tensor = torch.Tensor


def moe_gate_dispatch(
    x: Tensor,
    gate_logits: Tensor,
    corr_bias: Tensor | None,
    k: int,
    capacity: int,
    use_pad: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Copy each token to the rows of its ``k`` best experts, at most ``capacity`` per expert.

    Source: operator ``moe_gate_dispatch``. ``x`` and ``gate_logits`` have gradients.

    Args:
        x: [tokens, hidden].
        gate_logits: [tokens, experts] probabilities of the gate.
        corr_bias: [experts], added for the choice alone, or None.
        k: Experts per token; of equal ones, the first.
        capacity: Rows per expert. Other tokens are dropped: weight 0, index 0.
        use_pad: True gives each expert ``capacity`` rows, first those of the tokens' first choice;
            False puts the rows of the experts one after another, in the order of the tokens.

    Returns:
        y, [experts * capacity, hidden] or [tokens * k, hidden], with zeros where no token is; the
        weights, [tokens, k]; the rows in y, int32 [k, tokens]; the number of rows of each expert
        and those before it, int64 [experts], dropped ones too; and the experts, int32 [tokens, k].

    Raises:
        ArgumentError: ``k`` is not 1 to the number of experts, or ``capacity`` is below 1.
        ShapeError: The shapes do not fit.
    """
    _check_gate(x, gate_logits, corr_bias, k, capacity)
    tokens, experts = gate_logits.shape
    scores = gate_logits if corr_bias is None else gate_logits + corr_bias
    chosen = scores.detach().sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = gate_logits.gather(1, chosen)
    choice = torch.arange(k, device=x.device).expand(tokens, k)
    keys = (chosen * k + choice if use_pad else chosen).flatten()
    order = keys.sort(stable=True).indices
    expert_of_row = chosen.flatten()[order]
    ends = torch.zeros(experts, dtype=torch.int64, device=x.device)
    ends = ends.scatter_add(0, expert_of_row, torch.ones_like(expert_of_row)).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    row = torch.arange(tokens * k, device=x.device)
    in_expert = row - starts[expert_of_row]
    keep_mask = in_expert < capacity
    target = expert_of_row * capacity + in_expert if use_pad else row
    rows = experts * capacity if use_pad else tokens * k
    spare = torch.where(keep_mask, target, rows)  # one more row takes the dropped tokens
    y = x.new_zeros(rows + 1, x.shape[1]).index_copy(0, spare, x[order // k])[:rows]
    rows_of_tokens = torch.zeros_like(target).scatter(0, order, torch.where(keep_mask, target, 0))
    kept_choices = torch.zeros_like(keep_mask).scatter(0, order, keep_mask).view(tokens, k)
    weights = weights.where(kept_choices, 0)
    return y, weights, rows_of_tokens.view(tokens, k).t().int(), ends, chosen.int()


def _check_gate(
    x: Tensor, gate_logits: Tensor, corr_bias: Tensor | None, k: int, capacity: int
) -> None:
    shapes = [tuple(each.shape) for each in (x, gate_logits)]
    bias = None if corr_bias is None else tuple(corr_bias.shape)
    if x.dim() != 2 or gate_logits.dim() != 2 or len(x) != len(gate_logits):
        raise ShapeError(
            f"moe_gate_dispatch: x and gate_logits have shapes {shapes}; expected [tokens, hidden] "
            f"and [tokens, experts]"
        )
    if bias not in (None, (gate_logits.shape[1],)):
        raise ShapeError(
            f"moe_gate_dispatch: corr_bias has shape {bias}; expected ({gate_logits.shape[1]},)"
        )
    if not 1 <= k <= gate_logits.shape[1] or capacity < 1:
        raise ArgumentError(
            f"moe_gate_dispatch: k={k} and capacity={capacity}; expected k of 1 to "
            f"{gate_logits.shape[1]}, the number of experts, and a capacity of 1 or more"
        )


def moe_combine(x: Tensor, combine_weights: Tensor, scatter_index: Tensor) -> Tensor:
    """Return, for each token, the weighted sum of its rows in ``x``.

    Source: operator ``moe_combine``. ``x`` and ``combine_weights`` have gradients.

    Args:
        x: [rows, hidden].
        combine_weights: [tokens, k].
        scatter_index: [tokens, k] int32 or int64 rows of ``x``. ``moe_gate_dispatch`` returns the
            transposed form.

    Returns:
        [tokens, hidden] in the dtype of ``x``.

    Raises:
        ShapeError: The shapes do not fit.
    """
    if x.dim() != 2 or combine_weights.dim() != 2 or combine_weights.shape != scatter_index.shape:
        shapes = [tuple(each.shape) for each in (x, combine_weights, scatter_index)]
        raise ShapeError(
            f"moe_combine: x, combine_weights and scatter_index have shapes {shapes}; expected "
            f"[rows, hidden], [tokens, k] and [tokens, k]"
        )
    y = x.new_zeros(len(scatter_index), x.shape[1])
    for weight, index in zip(
        combine_weights.unbind(1), scatter_index.long().unbind(1), strict=True
    ):
        y = y + weight.to(x.dtype)[:, None] * x[index]
    return y
