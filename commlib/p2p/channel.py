"""The push kernels of an engine: their channels, and the carrier of the exchange with experts."""

from typing import Protocol

import torch

from commlib.p2p.experts.tables import Choices, ExpertCounts, ExpertSpec, ExpertTables, Overflow

Tensor = torch.Tensor


class Channel(Protocol):
    """Memory that the ranks of a ring share, and kernels that work in it."""

    def ready(self) -> None:
        """Raise what the next call would raise."""

    def check(self) -> None:
        """Raise what a kernel has reported; never blocks."""

    def reset(self) -> None:
        """Start again, when no kernel of any rank runs."""

    def close(self) -> None:
        """Free the memory once every rank has unmapped it."""


class ExpertKernels(Protocol):
    """The kernels of expert exchanges: one launch per call, on the current stream.

    All tensors are dense and on the ring's device. A call fills its outputs completely. The issue
    lock is held, except in ``carries``.
    """

    def carries(self, spec: ExpertSpec) -> bool:
        """Return True if there are kernels for such calls; the same on all ranks."""

    def dispatch(
        self,
        rows: Tensor,
        x: Tensor,
        scales: Tensor | None,
        choices: Choices,
        tables: ExpertTables,
        counts: ExpertCounts,
        spec: ExpertSpec,
    ) -> None:
        """Fill ``rows``, ``scales``, ``tables`` and ``counts`` from every rank's tokens ``x``."""

    def scatter(
        self, rows: Tensor, x: Tensor, tables: ExpertTables, active: Tensor | None, spec: ExpertSpec
    ) -> None:
        """Fill ``rows`` from every rank's ``x``, where ``tables`` say; unused rows become 0."""

    def combine(
        self, out: Tensor, y: Tensor, tables: ExpertTables, active: Tensor | None, spec: ExpertSpec
    ) -> None:
        """Fill ``out`` with the sums of each token's rows in every rank's ``y``."""

    def overflow(self) -> Overflow | None:
        """Return what was recorded of choices beyond a capacity, once; never blocks."""
