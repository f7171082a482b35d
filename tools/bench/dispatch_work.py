"""The work of benchmark `dispatch`: ours, a bare exchange, and packed messages of torch."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from commlib import CommContext, ops
from commlib.ops.expert_parallel.handle import Dispatched
from commlib.p2p.experts.tables import GROUP, local_experts
from commlib.p2p.routes import routes
from commlib.tools.bench.peers.flashinfer_experts import Tokens


class Work:
    """The tokens of one rank, their experts, and the peers' exchanges in each way."""

    def __init__(
        self, ring: CommContext, tokens: int, width: int, experts: int, top_k: int
    ) -> None:
        same = torch.Generator().manual_seed(0)  # every rank draws the choices of all
        scores = torch.rand(ring.size, tokens, experts, generator=same)
        ids = scores.topk(top_k, 2).indices
        self.ring, self.experts, self.local = ring, experts, local_experts(experts, ring.size)
        self.capacity = int(ids.view(-1).bincount(minlength=experts).max())
        device = ring.device
        mine = torch.Generator(device).manual_seed(1 + ring.rank)  # other tokens on every rank
        self.x = torch.randn(tokens, width, device=device, generator=mine).bfloat16()
        self.ids = ids[ring.rank].to(device)
        self.weights = torch.full((tokens, top_k), 1 / top_k, device=device)
        self.tokens = Tokens(self.x, self.ids, self.weights, experts)
        self.expected = self.x.float()  # experts return what they get
        # A token has an expert on a rank: [from, token, to].
        self.receivers = torch.nn.functional.one_hot(ids // self.local, ring.size).amax(2)
        self._plan_bare()
        self._plan_packed(ids)
        self.sent_rows = self.dispatch()
        self.packed_rows = self.packed_dispatch()

    def dispatch(self, quantize: str | None = None) -> Dispatched:
        """Send the tokens to their experts."""
        numbers = self.experts, self.capacity
        kwargs: dict[str, Any] = {"weights": self.weights, "on_overflow": "drop"}
        return ops.expert_dispatch(self.x, self.ids, *numbers, quantize=quantize, **kwargs)

    def combine(self) -> torch.Tensor:
        """Bring the rows of one dispatch back to their tokens."""
        return ops.expert_combine(self.sent_rows.rows, self.sent_rows.handle)

    def check(self) -> None:
        """Raise if tokens return with other values, or fp8 rows differ too much."""
        small = self.dispatch("fp8")
        assert small.scales is not None
        wide = small.rows.float().unflatten(2, (-1, GROUP)) * small.scales[..., None]
        apart = {
            "expert_combine": (self.combine(), self.expected, 0.1),
            "all_to_all_single": (self.packed_combine(), self.expected, 0.1),
            "fp8": (wide.flatten(2), self.sent_rows.rows, 0.5),
        }
        for name, (actual, expected, limit) in apart.items():
            most = float((actual.float() - expected.float()).abs().max())
            if most > limit:
                raise AssertionError(f"{name}: {most} from what was sent")

    def _plan_bare(self) -> None:
        """One row per token and rank of its experts."""
        ranks = self.receivers
        counts = ranks.sum(1)[..., None].numpy().astype(np.int64)  # [from, to, 1]
        rank = self.ring.rank
        self.there, self.back = (routes(counts, rank, back=back) for back in (False, True))
        tokens = ranks[rank].T.nonzero()[:, 1].to(self.x.device)  # by receiver, then token
        self.sent = self.x[tokens]
        self.held = self.x.new_empty((int(counts[:, rank].sum()), self.x.shape[1]))
        self.sums = self.held.float()
        self.returned = torch.empty_like(self.sent, dtype=torch.float32)

    def bare_dispatch(self) -> None:
        """Send the same bytes to the ranks of the experts."""
        self.ring._exchange_rows(self.held, self.sent, self.there)

    def bare_combine(self) -> None:
        """Send sums of the same bytes back."""
        self.ring._exchange_rows(self.returned, self.sums, self.back)

    def _plan_packed(self, ids: torch.Tensor) -> None:
        """One row per choice, by receiver on the way, by expert there."""
        ring, local, top_k = self.ring, self.local, ids.shape[2]
        flat, device = ids.view(ring.size, -1), self.x.device
        order = flat[ring.rank].argsort(stable=True)
        counts = torch.stack([one.bincount(minlength=ring.size * local) for one in flat])
        table = counts.view(ring.size, ring.size, local)
        self.splits = table[ring.rank].sum(1).tolist(), table[:, ring.rank].sum(1).tolist()
        came = (
            torch.arange(local).repeat(ring.size).repeat_interleave(table[:, ring.rank].reshape(-1))
        )
        sorted_ = came.argsort(stable=True)
        self.out_order, self.choice_order = (order // top_k).to(device), order.argsort().to(device)
        self.by_expert, self.by_sender = sorted_.to(device), sorted_.argsort().to(device)
        self.came = self.x.new_empty((len(came), self.x.shape[1]))
        self.home = self.x.new_empty((len(order), self.x.shape[1]))

    def packed_dispatch(self) -> torch.Tensor:
        """One message per rank; rows are put in order before and after it."""
        sends, takes = self.splits
        dist.all_to_all_single(self.came, self.x.index_select(0, self.out_order), takes, sends)
        return self.came.index_select(0, self.by_expert)

    def packed_combine(self) -> torch.Tensor:
        """One message per rank back; rows are put in order, weighted and summed."""
        sends, takes = self.splits
        rows = self.packed_rows.index_select(0, self.by_sender)
        dist.all_to_all_single(self.home, rows, sends, takes)
        choices = self.home.index_select(0, self.choice_order).view(*self.ids.shape, -1)
        return (choices * self.weights[..., None]).sum(1).to(self.x.dtype)
