"""``moe_permute`` and ``moe_unpermute``: rows of each expert, padded. They do not communicate."""

import itertools
from collections.abc import Sequence

import torch
from torch.nn import functional

from commlib.errors import ArgumentError, DtypeError, ShapeError
from commlib.streams import sees_capture

Tensor = torch.Tensor


def moe_permute(
    hidden_states: Tensor,
    scale: Tensor | None,
    expert_routemap_topk: Tensor,
    expert_prob_topk: Tensor,
    num_experts: int,
    tokens_per_expert: Sequence[int],
    padding_alignment: int,
    do_gather: bool = True,
    using_ue8m0_scale: bool = False,
    return_expert_indices: bool = False,
    override_buffer_size: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
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
        using_ue8m0_scale: True if ``scale`` has four factors of one byte in each int32.
        return_expert_indices: True also returns the expert of each row.
        override_buffer_size: The number of rows, at least those of all experts; -1 is as many.

    Returns:
        The hidden states, [rows, hidden]; the row of each token at each expert, int32
        [tokens, experts], -1 for none; the probabilities, [rows]; the scales, [rows, …]; and the
        expert of each row, int32 [rows], -1 for padding. The last is empty without
        ``return_expert_indices``.

    Raises:
        ArgumentError: ``tokens_per_expert`` is not one count per expert, or, outside captures, not
            the counts of the map; ``padding_alignment`` is below 1; or ``override_buffer_size`` is
            below the number of rows.
        DtypeError: ``scale`` is not int32 with ``using_ue8m0_scale``.
        ShapeError: The shapes do not fit.
    """
    _check_permuted(hidden_states, expert_routemap_topk, expert_prob_topk, scale)
    if using_ue8m0_scale and scale is not None and scale.dtype != torch.int32:
        raise DtypeError(
            f"moe_permute: scale is {scale.dtype} with using_ue8m0_scale=True; expected torch.int32"
        )
    sizes = _padded(expert_routemap_topk, num_experts, tokens_per_expert, padding_alignment)
    size = _buffer_size(sum(sizes), override_buffer_size)
    tokens = len(hidden_states)
    experts = expert_routemap_topk.long()
    routed = experts >= 0
    column = experts.clamp(min=0)
    taken = torch.zeros(tokens, num_experts, dtype=torch.int64, device=experts.device)
    taken = taken.scatter_add(1, column, routed.long())
    starts = torch.tensor([0, *itertools.accumulate(sizes)][:-1], device=experts.device)
    row_map = torch.where(taken > 0, taken.cumsum(0) - 1 + starts, -1)
    rows = torch.where(routed, row_map.gather(1, column), size).flatten()
    token = torch.arange(tokens, device=experts.device).repeat_interleave(experts.shape[1])

    def moved(values: Tensor, source: Tensor | None) -> Tensor:
        """Return ``values`` at their rows; one more row takes what has no expert."""
        if values.dtype.is_floating_point and values.dtype.itemsize == 1:  # torch copies its bytes
            return moved(values.view(torch.uint8), source).view(values.dtype)
        taken_values = values if source is None else values[source]
        out = values.new_zeros(size + 1, *taken_values.shape[1:])
        return out.index_copy(0, rows, taken_values)[:-1]

    states = moved(hidden_states, token) if do_gather else hidden_states[:0]
    scales = scale if scale is None else moved(scale, token) if do_gather else scale[:0]
    indices = torch.full((size + 1,), -1, dtype=torch.int32, device=experts.device)
    indices = indices.index_copy(0, rows, experts.flatten().int())[:-1]
    indices = indices if return_expert_indices else indices[:0]
    return states, row_map.int(), moved(expert_prob_topk.flatten(), None), scales, indices


def _buffer_size(rows: int, override_buffer_size: int) -> int:
    """Return the number of rows of the results of ``moe_permute``."""
    if override_buffer_size == -1:
        return rows
    if override_buffer_size < rows:
        raise ArgumentError(
            f"moe_permute: override_buffer_size={override_buffer_size}; expected {rows} or more, "
            f"the rows of all experts with their padding; pass -1 for {rows}"
        )
    return override_buffer_size


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
    if not sees_capture(routemap) and not torch.compiler.is_compiling():
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
    total_zipped_tokens_num: int,
    num_experts: int,
    use_mix_precision: bool = True,
    using_weighted_combine: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return, for each token, the sum of its rows, and its probabilities: undo ``moe_permute``.

    Source: operator ``moe_unpermute``. The rows and the probabilities have gradients.

    Args:
        hidden_states_unzipped: [rows, hidden].
        zipped_expertwise_rowmap: [tokens, experts] rows, as ``moe_permute`` returns them.
        expert_routemap_topk: [tokens, k] ids of experts; -1 is none.
        token_prob_unzipped: [rows] or [rows, 1].
        total_zipped_tokens_num: The number of tokens.
        num_experts: The number of experts.
        use_mix_precision: True adds in float32 or wider, False in the dtype of the rows.
        using_weighted_combine: True multiplies each row by its probability first.

    Returns:
        [tokens, hidden] in the dtype of the rows, added in the order of the experts; and
        [tokens, k]. Both are 0 where there is no expert, also without any rows.

    Raises:
        ShapeError: The map is not [total_zipped_tokens_num, num_experts], or the shapes do not fit.
    """
    rowmap, routemap = zipped_expertwise_rowmap.long(), expert_routemap_topk.long()
    if tuple(rowmap.shape) != (total_zipped_tokens_num, num_experts) or routemap.dim() != 2:
        raise ShapeError(
            f"moe_unpermute: zipped_expertwise_rowmap and expert_routemap_topk have shapes "
            f"{tuple(rowmap.shape)} and {tuple(routemap.shape)}; expected "
            f"{(total_zipped_tokens_num, num_experts)} and ({total_zipped_tokens_num}, k)"
        )
    rows, probabilities = hidden_states_unzipped, token_prob_unzipped.flatten()
    first = int(not len(rows))
    if first:  # index 0 then is a row of zeros, for tokens without an expert
        rows = functional.pad(rows, (0, 0, 1, 0))
        probabilities = functional.pad(probabilities, (1, 0))
    wide = torch.promote_types(rows.dtype, torch.float32) if use_mix_precision else rows.dtype
    total = rows.new_zeros(total_zipped_tokens_num, rows.shape[1], dtype=wide)
    for expert in routemap.sort(dim=1).values.unbind(1):
        row = rowmap.gather(1, expert.clamp(min=0)[:, None])[:, 0]
        at = (row + first).clamp(min=0)
        term = rows[at].to(wide)
        if using_weighted_combine:
            term = term * probabilities[at].to(wide)[:, None]
        total = torch.where((expert >= 0)[:, None], total + term, total)
    at = (rowmap.gather(1, routemap.clamp(min=0)) + first).clamp(min=0)
    return total.to(rows.dtype), probabilities[at].where(routemap >= 0, 0)
