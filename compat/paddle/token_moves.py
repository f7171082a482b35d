"""Legacy helpers that copy tokens to the rows of their experts, and back: none communicates."""

import itertools
from collections.abc import Sequence

import torch
from torch.nn import functional

from commlib.errors import ArgumentError, ShapeError
from commlib.streams import capturing

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
    kept = in_expert < capacity
    target = expert_of_row * capacity + in_expert if use_pad else row
    rows = experts * capacity if use_pad else tokens * k
    spare = torch.where(kept, target, rows)  # one more row takes the dropped tokens
    y = x.new_zeros(rows + 1, x.shape[1]).index_copy(0, spare, x[order // k])[:rows]
    rows_of_tokens = torch.zeros_like(target).scatter(0, order, torch.where(kept, target, 0))
    kept_choices = torch.zeros_like(kept).scatter(0, order, kept).view(tokens, k)
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


def moe_permute(
    hidden_states: Tensor,
    scale: Tensor | None,
    expert_routemap_topk: Tensor,
    expert_prob_topk: Tensor,
    num_experts: int,
    tokens_per_expert: Sequence[int],
    padding_alignment: int,
    do_gather: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Copy tokens to the rows of their experts, in the order of the tokens.

    Source: operator ``moe_permute``. ``hidden_states`` and ``expert_prob_topk`` have gradients.

    Args:
        hidden_states: [tokens, hidden] of any dtype.
        scale: [tokens, …] factors of the tokens, which move with them, or None.
        expert_routemap_topk: [tokens, k] ids of different experts; -1 is none.
        expert_prob_topk: [tokens, k].
        num_experts: Number of experts.
        tokens_per_expert: Number of tokens of each expert.
        padding_alignment: The rows of each expert are padded to a multiple of it, with zeros.
        do_gather: False copies no hidden states and no scales, which are then empty.

    Returns:
        The hidden states, [rows, hidden]; the row of each token at each expert, int32
        [tokens, experts], -1 for none; the probabilities, [rows]; and the scales, [rows, …].

    Raises:
        ArgumentError: ``tokens_per_expert`` is not one count per expert, or, outside captures, not
            the counts of the map; or ``padding_alignment`` is below 1.
        ShapeError: The shapes do not fit.
    """
    _check_permuted(hidden_states, expert_routemap_topk, expert_prob_topk, scale)
    sizes = _padded(expert_routemap_topk, num_experts, tokens_per_expert, padding_alignment)
    tokens = len(hidden_states)
    experts = expert_routemap_topk.long()
    routed = experts >= 0
    column = experts.clamp(min=0)
    taken = torch.zeros(tokens, num_experts, dtype=torch.int64, device=experts.device)
    taken = taken.scatter_add(1, column, routed.long())
    starts = torch.tensor([0, *itertools.accumulate(sizes)][:-1], device=experts.device)
    row_map = torch.where(taken > 0, taken.cumsum(0) - 1 + starts, -1)
    rows = torch.where(routed, row_map.gather(1, column), sum(sizes)).flatten()
    token = torch.arange(tokens, device=experts.device).repeat_interleave(experts.shape[1])

    def moved(values: Tensor, source: Tensor | None) -> Tensor:
        """Return ``values`` at their rows; one more row takes what has no expert."""
        taken_values = values if source is None else values[source]
        out = values.new_zeros(sum(sizes) + 1, *taken_values.shape[1:])
        return out.index_copy(0, rows, taken_values)[:-1]

    states = moved(hidden_states, token) if do_gather else hidden_states[:0]
    scales = scale if scale is None else moved(scale, token) if do_gather else scale[:0]
    return states, row_map.int(), moved(expert_prob_topk.flatten(), None), scales


def _check_permuted(
    hidden_states: Tensor, routemap: Tensor, probabilities: Tensor, scale: Tensor | None
) -> None:
    lengths = {len(each) for each in (hidden_states, routemap, scale) if each is not None}
    if hidden_states.dim() != 2 or routemap.dim() != 2 or len(lengths) > 1:
        raise ShapeError(
            f"moe_permute: hidden_states, expert_routemap_topk and scale have shapes "
            f"{tuple(hidden_states.shape)}, {tuple(routemap.shape)} and "
            f"{None if scale is None else tuple(scale.shape)}; expected [tokens, hidden], "
            f"[tokens, k] and [tokens, ...]"
        )
    if probabilities.shape != routemap.shape:
        raise ShapeError(
            f"moe_permute: expert_prob_topk has shape {tuple(probabilities.shape)}; expected "
            f"{tuple(routemap.shape)}, that of expert_routemap_topk"
        )


def _padded(
    routemap: Tensor, experts: int, tokens_per_expert: Sequence[int], alignment: int
) -> list[int]:
    """Return the rows of each expert."""
    counts = [int(count) for count in tokens_per_expert]
    if alignment < 1 or len(counts) != experts:
        raise ArgumentError(
            f"moe_permute: padding_alignment={alignment} and {len(counts)} counts in "
            f"tokens_per_expert; expected an alignment of 1 or more and {experts} counts, one per "
            f"expert"
        )
    if not capturing() and not torch.compiler.is_compiling():
        routed = routemap[routemap >= 0].long()
        real = torch.bincount(routed, minlength=experts).tolist()
        if real != counts:
            raise ArgumentError(
                f"moe_permute: tokens_per_expert={counts}; expected {real}, the counts of "
                f"expert_routemap_topk"
            )
    return [-(-count // alignment) * alignment for count in counts]


def moe_unpermute(
    hidden_states_unzipped: Tensor,
    zipped_expertwise_rowmap: Tensor,
    expert_routemap_topk: Tensor,
    token_prob_unzipped: Tensor,
    total_zipped_tokens: int,
    num_experts: int,
    use_mix_precision: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return, for each token, the sum of its rows, and its probabilities: undo ``moe_permute``.

    Source: operator ``moe_unpermute``. The rows and the probabilities have gradients.

    Args:
        hidden_states_unzipped: [rows, hidden].
        zipped_expertwise_rowmap: [tokens, experts] rows, as ``moe_permute`` returns them.
        expert_routemap_topk: [tokens, k] ids of experts; -1 is none.
        token_prob_unzipped: [rows] or [rows, 1].
        total_zipped_tokens: The number of tokens.
        num_experts: The number of experts.
        use_mix_precision: True adds in float32 or wider, False in the dtype of the rows.

    Returns:
        [tokens, hidden] in the dtype of the rows, added in the order of the experts; and
        [tokens, k]. Both are 0 where there is no expert, also without any rows.

    Raises:
        ShapeError: The map is not [total_zipped_tokens, num_experts], or the shapes do not fit.
    """
    rowmap, routemap = zipped_expertwise_rowmap.long(), expert_routemap_topk.long()
    if tuple(rowmap.shape) != (total_zipped_tokens, num_experts) or routemap.dim() != 2:
        raise ShapeError(
            f"moe_unpermute: zipped_expertwise_rowmap and expert_routemap_topk have shapes "
            f"{tuple(rowmap.shape)} and {tuple(routemap.shape)}; expected "
            f"{(total_zipped_tokens, num_experts)} and ({total_zipped_tokens}, k)"
        )
    rows, probabilities = hidden_states_unzipped, token_prob_unzipped.flatten()
    first = int(not len(rows))
    if first:  # index 0 then is a row of zeros, for tokens without an expert
        rows = functional.pad(rows, (0, 0, 1, 0))
        probabilities = functional.pad(probabilities, (1, 0))
    wide = torch.promote_types(rows.dtype, torch.float32) if use_mix_precision else rows.dtype
    total = rows.new_zeros(total_zipped_tokens, rows.shape[1], dtype=wide)
    for expert in routemap.sort(dim=1).values.unbind(1):
        row = rowmap.gather(1, expert.clamp(min=0)[:, None])[:, 0]
        term = rows[(row + first).clamp(min=0)].to(wide)
        total = torch.where((expert >= 0)[:, None], total + term, total)
    at = (rowmap.gather(1, routemap.clamp(min=0)) + first).clamp(min=0)
    return total.to(rows.dtype), probabilities[at].where(routemap >= 0, 0)
