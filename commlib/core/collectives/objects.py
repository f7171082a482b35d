"""Collectives of Python objects and integers, which travel between the hosts."""

from collections.abc import Sequence
from typing import Any, TypeVar

from commlib.core.objects import decode, encode
from commlib.core.ring import Ring
from commlib.core.validation import check_position
from commlib.errors import ArgumentError

Value = TypeVar("Value")


class Objects(Ring):
    """The collectives of a ring over settings, names, states and other Python objects.

    They go through the host exchange, at about 15 MB/s, and every member receives every object:
    large tensors belong in the collectives of tensors. Each blocks the host until every member has
    called it, at most ``timeout`` seconds.

    What arrives is read as data: plain values, tensors, and classes that the program has named by
    ``torch.serialization.add_safe_globals``. With ``pickle=True`` on every rank it may be anything
    that pickle carries, and the sender chooses what code is run to restore it.
    """

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's integers.

        For what the ranks must agree on before a launch. It uses shared memory on one host and TCP
        (gloo) between several, and is allowed during a capture. Every member calls it; the first
        call sets it up. It blocks the host at most ``timeout`` seconds.

        Args:
            values: Integers of 64 bits; lengths may differ between ranks.

        Returns:
            The values of each rank, in rank order.

        Raises:
            ArgumentError: A value is another one. Nothing is sent and the ring stays usable. The
                other members wait, at most ``timeout`` seconds, for a correct call.
            CommTimeout: Naming the positions of the members that are late.
            MismatchError: A member exchanges for another call, such as ``split``.
            EngineError: A member has ended.
            RingError: The ring has failed or is closed.
        """
        return self._hosts.exchange(values, detail="of the program")

    def all_gather_object(self, obj: Value, *, pickle: bool = False) -> list[Value]:
        """Return the ``obj`` of every rank, in rank order.

        Args:
            obj: Any object; GPU tensors are received on the ring's device.
            pickle: Restore what needs code; only for ranks that trust each other.

        Raises:
            ArgumentError: ``obj`` can't be carried, and nothing is sent; or a received object needs
                code.
            MismatchError: Members have made different calls, or named different roots.
            CommTimeout: Naming the positions of the members that are late.
            RingError: The ring has failed or is closed.
        """
        name = "all_gather_object"
        rows = self._hosts.exchange_bytes(encode(self, name, obj, pickle=pickle), name)
        return [decode(self, name, row, pickle=pickle) for row in rows]

    def broadcast_object(self, obj: Any, *, root: int, pickle: bool = False) -> object:
        """Return the ``obj`` of ``root``; on ``root`` the object itself.

        Args:
            obj: As in ``all_gather_object``; not read on other ranks.
            root: Position of the rank that sends.
            pickle: As in ``all_gather_object``.

        Raises:
            PeerError: ``root`` is not a position in the ring.
            Otherwise as ``all_gather_object``.
        """
        name = "broadcast_object"
        row = self._row_of(name, root, obj, pickle)
        return obj if self.rank == root else decode(self, name, row, pickle=pickle)

    def gather_object(self, obj: Value, *, root: int, pickle: bool = False) -> list[Value] | None:
        """Return the ``obj`` of every rank on ``root``, in rank order; None elsewhere.

        Args:
            obj: As in ``all_gather_object``.
            root: Position of the rank that receives.
            pickle: As in ``all_gather_object``.

        Raises:
            PeerError: ``root`` is not a position in the ring.
            Otherwise as ``all_gather_object``.
        """
        name = "gather_object"
        check_position(self, name, "root", root)
        data = encode(self, name, obj, pickle=pickle)
        rows = self._hosts.exchange_bytes(data, name, f"root={root}")
        if self.rank != root:
            return None
        return [decode(self, name, row, pickle=pickle) for row in rows]

    def scatter_object(
        self, objs: Sequence[Any] | None, *, root: int, pickle: bool = False
    ) -> object:
        """Return this rank's entry of the ``objs`` of ``root``.

        Args:
            objs: One object per rank on ``root``; not read on other ranks.
            root: Position of the rank that sends.
            pickle: As in ``all_gather_object``.

        Raises:
            PeerError: ``root`` is not a position in the ring.
            ArgumentError: ``objs`` has not one entry per rank; nothing is sent.
            Otherwise as ``all_gather_object``.
        """
        name = "scatter_object"
        check_position(self, name, "root", root)
        if self.rank == root and (not isinstance(objs, (list, tuple)) or len(objs) != self.size):
            raise ArgumentError(
                f"{self._describe(name)}: objs={objs!r:.80}; expected a list of {self.size} "
                f"objects, one per rank"
            )
        row = self._row_of(name, root, objs, pickle)
        entries: Sequence[object] = decode(self, name, row, pickle=pickle)
        return entries[self.rank]

    def _row_of(self, name: str, root: int, obj: object, pickle: bool) -> bytes:
        """Return the encoded object of ``root``."""
        check_position(self, name, "root", root)
        data = encode(self, name, obj, pickle=pickle) if self.rank == root else b""
        return self._hosts.exchange_bytes(data, name, f"root={root}")[root]
