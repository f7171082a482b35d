"""The parameters of one dtype in one flat buffer, with this rank's shard of their state."""

from collections.abc import Sequence

import torch

from commlib.ops.lamb.layout import Layout, pieces

Tensor = torch.Tensor


class Part:
    """Parameters of one dtype: flat values and gradients, and this rank's shard of the state.

    The parameters and their gradients become views of the flat buffers.

    Attributes:
        params: The parameters, in the order of the buffer.
        shapes: Their shapes.
        first: Position of the first parameter among those of all parts.
        layout: Places in the buffer.
        values: [numel] values of all parameters.
        gradients: [numel] gradients of all parameters on this rank.
        accumulated: [numel] sum over microbatches; None without accumulation.
        weights: [shard] float32 values of this rank's shard: the values, or their master copy.
        copy: [shard] low-precision values of this rank's shard; None if the dtype is float32.
        exp_avg: [shard] float32 mean of the gradients.
        exp_avg_sq: [shard] float32 mean of the squared gradients.
        segments: The parameters' parts in the shard.
        pieces: [pieces, 3] int64 for kernels: first element, elements, position of the parameter
            among those of all parts.
        firsts: [parameters + 1] int64: first piece of each parameter.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        first: int,
        shards: int,
        rank: int,
        sum_dtype: torch.dtype | None,
    ) -> None:
        self.params, self.first, self.rank = list(params), first, rank
        self.shapes = [tuple(p.shape) for p in params]
        # Dense strides in the order of the parameter's own, such as those of channels_last.
        self._strides = [torch.empty_like(p, device="meta").stride() for p in params]
        self.layout = Layout([p.numel() for p in params], shards)
        self.values = params[0].new_zeros(self.layout.numel)
        self.gradients = torch.zeros_like(self.values)
        self.accumulated = None
        if sum_dtype is not None:
            self.accumulated = torch.zeros_like(self.values, dtype=sum_dtype)
        self._gradient_views = self.views(self.gradients)
        for param, view in zip(self.params, self._gradient_views, strict=True):
            if param.grad is not None:
                view.copy_(param.grad)
        places = self.views(self.values)
        for param, view in zip(self.params, places, strict=True):
            view.copy_(param.detach())
            param.data = view
        self._addresses = [view.data_ptr() for view in places]
        self._gradient_addresses = [view.data_ptr() for view in self._gradient_views]
        self.attach_gradients()
        shard = self.values[self.layout.shard(rank)]
        is_low = shard.dtype is not torch.float32
        self.copy = shard if is_low else None
        self.weights = shard.float() if is_low else shard
        self.exp_avg, self.exp_avg_sq = (torch.zeros_like(self.weights) for _ in range(2))
        self.segments = self.layout.segments(rank)
        cut = pieces(self.segments)
        rows = [[start, length, first + parameter] for parameter, start, length in cut]
        owners = torch.tensor([piece.parameter for piece in cut], dtype=torch.int64)
        firsts = torch.searchsorted(owners, torch.arange(len(self.params) + 1))
        self.pieces = torch.tensor(rows, dtype=torch.int64).view(-1, 3).to(shard.device)
        self.firsts = firsts.to(shard.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the place of every parameter in ``flat`` [numel], in the parameter's shape."""
        return [self._view(flat, number) for number in range(len(self.params))]

    def _view(self, flat: Tensor, number: int) -> Tensor:
        start = flat.storage_offset() + self.layout.starts[number]
        return flat.as_strided(self.shapes[number], self._strides[number], start)

    def detached(self) -> list[int]:
        """Return the positions of parameters that are not views of the buffer any more.

        ``model.double().float()`` and ``p.data = x`` do that. Nothing is launched.
        """
        dtype = self.values.dtype
        return [
            number
            for number, (param, address) in enumerate(
                zip(self.params, self._addresses, strict=True)
            )
            if param.data_ptr() != address
            or param.dtype is not dtype
            or param.shape != self.shapes[number]
        ]

    def reattach(self, detached: Sequence[int]) -> None:
        """Copy the values of parameters into the buffer, and make the parameters views again.

        Master weights stay where they still round to these values.
        """
        for number in detached:
            param, view = self.params[number], self._view(self.values, number)
            view.copy_(param.detach())
            param.data = view
        if detached and self.copy is not None:
            unchanged = self.weights.to(self.copy.dtype) == self.copy
            self.weights.copy_(torch.where(unchanged, self.weights, self.copy.float()))

    def attach_gradients(self) -> None:
        """Make the gradients views of the flat buffer; a backward then adds to it."""
        for number, param in enumerate(self.params):
            param.grad = self._gradient_view(number)

    def collect_gradients(self) -> None:
        """Copy gradients that are elsewhere into the flat buffer; a missing one becomes zero."""
        sources, targets = [], []
        for number, param in enumerate(self.params):
            view = self._gradient_view(number)
            if param.grad is None:
                view.zero_()
            elif param.grad is not view:
                sources.append(param.grad)
                targets.append(view)
        if sources:
            torch._foreach_copy_(targets, sources)

    def _gradient_view(self, number: int) -> Tensor:
        """Return the place of a gradient; ``model.float()`` moves the tensor that was there."""
        view = self._gradient_views[number]
        if view.data_ptr() != self._gradient_addresses[number]:
            view = self._gradient_views[number] = self._view(self.gradients, number)
        return view

    def refresh_weights(self) -> None:
        """Set the master weights to the values of the parameters."""
        if self.copy is not None:
            self.weights.copy_(self.copy)


def make_parts(
    listed: Sequence[Tensor], *, shards: int, rank: int, accumulates: bool, in_float32: bool
) -> tuple[list[int], list[Part]]:
    """Put parameters into buffers, float32 first.

    Args:
        listed: The parameters.
        shards: Number of ranks that divide the state.
        rank: Position of this rank among them.
        accumulates: True makes buffers for sums over microbatches.
        in_float32: True makes these float32.

    Returns:
        The order of the parameters in the buffers, and the buffers.
    """
    order, parts = list[int](), list[Part]()
    for low in (False, True):
        indices = [n for n, p in enumerate(listed) if (p.dtype is not torch.float32) == low]
        if not indices:
            continue
        dtype = torch.float32 if in_float32 else listed[indices[0]].dtype
        part = Part(
            [listed[n] for n in indices],
            first=len(order),
            shards=shards,
            rank=rank,
            sum_dtype=dtype if accumulates else None,
        )
        order += indices
        parts.append(part)
    return order, parts
