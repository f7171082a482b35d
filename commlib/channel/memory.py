"""One block of memory of every rank of a ring, mapped into all of them."""

import ctypes
import secrets
from typing import Any

import torch

from commlib._deadline import Deadline
from commlib._host_group import host_number
from commlib._log import log
from commlib._ring import Ring
from commlib._streams import capturing

_WORD = 8  # bytes of a token


class PeerMemory:
    """``bases[r]`` is where rank r's ``nbytes`` zeroed bytes lie in this process."""

    def __init__(self, ring: Ring, bases: list[int], nbytes: int, name: str) -> None:
        self.bases, self.nbytes, self._ring = bases, nbytes, ring
        self._store = ring.store(name)

    def zero(self) -> None:
        """Put zeros into this rank's memory; blocks the host until they are there."""
        with torch.cuda.device(self._ring.device):
            _zero(self.bases[self._ring.rank], self.nbytes)

    def put(self, offset: int, data: bytes) -> None:
        """Write ``data`` into this rank's memory; blocks the host until it is there."""
        with torch.cuda.device(self._ring.device):
            _put(self.bases[self._ring.rank] + offset, data)

    def close(self) -> None:
        """Unmap the peers' memory, and free the own once every peer has unmapped it.

        Waits a second for peers that are closing too; what they still have mapped then is freed
        when another memory is shared or closed.
        """
        ring = self._ring
        with torch.cuda.device(ring.device):
            _unmap(self.bases, ring.rank)
            self._store.add("unmapped", 1)
            Deadline(_PATIENCE_S).poll(self._alone)
            _closed.append(self)
            _free_closed()

    def _alone(self) -> bool:
        return int(self._store.add("unmapped", 0)) >= self._ring.size


_PATIENCE_S = 1.0
_closed: list[PeerMemory] = []  # whose peers may still have them mapped


def _free_closed() -> None:
    for memory in list(_closed):
        try:
            alone = memory._alone()
        except RuntimeError as error:  # its store may be gone, and with it whoever could tell
            log.once("memory that peers may still have mapped stays taken: %s", error)
            continue
        if alone:
            _closed.remove(memory)
            _runtime().free(memory.bases[memory._ring.rank])


def share(ring: Ring, nbytes: int, name: str) -> PeerMemory | str:
    """Allocate ``nbytes`` on every rank and map them everywhere; every member calls it.

    ``name`` tells the memories of one ring apart.

    Returns the reason, the same on every rank, when one of them can't: ranks on several hosts, no
    peer access, no memory left, or a capture under way. Every pair of ranks has then proved that
    what one writes the other reads. Blocks the host at most the ring's timeout a step.
    """
    facts = ring.exchange([host_number(), capturing()])
    if any(busy for _, busy in facts):
        return CAPTURING
    if len({host for host, _ in facts}) > 1:
        return "the ranks are on several hosts"
    with torch.cuda.device(ring.device):
        _free_closed()
        return _mapped(ring, nbytes, name)


CAPTURING = "a rank is capturing a graph; a call before the capture sets the channel up"


def _mapped(ring: Ring, nbytes: int, name: str) -> PeerMemory | str:
    own, problem = 0, ""
    handle: list[int] = []
    try:
        own, handle = _allocate(nbytes)
    except Exception as error:  # every rank has to hear of it, whatever it is
        problem = f"{type(error).__name__}: {error}"
    handles = ring.exchange(handle)
    bases = [0] * ring.size
    bases[ring.rank] = own
    if all(handles):
        try:
            for peer, theirs in enumerate(handles):
                if peer != ring.rank:
                    bases[peer] = _open(theirs)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    good = _agree(ring, all(bases)) and _agree(ring, _proved(ring, bases))
    if good:
        return PeerMemory(ring, bases, nbytes, name)
    _unmap(bases, ring.rank)
    ring.exchange([])  # nobody has it mapped any more
    if own:
        _runtime().free(own)
    return f"no peer access between all ranks{problem and ': '}{problem}"


def _runtime() -> Any:
    from cupy.cuda import runtime

    return runtime


def _allocate(nbytes: int) -> tuple[int, list[int]]:
    """Return zeroed memory and its handle; torch's allocator could move or unmap its own."""
    own = _runtime().malloc(nbytes)
    try:
        _zero(own, nbytes)
        handle = _runtime().ipcGetMemHandle(own)
    except Exception:
        _runtime().free(own)
        raise
    words = (handle[at : at + _WORD] for at in range(0, len(handle), _WORD))
    return own, [int.from_bytes(word, "little", signed=True) for word in words]


def _zero(address: int, nbytes: int) -> None:
    _runtime().memset(address, 0, nbytes)
    _runtime().deviceSynchronize()


def _open(handle: list[int]) -> int:
    words = b"".join(word.to_bytes(_WORD, "little", signed=True) for word in handle)
    return int(_runtime().ipcOpenMemHandle(words))


def _unmap(bases: list[int], rank: int) -> None:
    for peer, base in enumerate(bases):
        if base and peer != rank:
            _runtime().ipcCloseMemHandle(base)


def _agree(ring: Ring, good: bool) -> bool:
    return all(row == [1] for row in ring.exchange([int(good)]))


def _proved(ring: Ring, bases: list[int]) -> bool:
    """Whether a token that each rank has written to every peer's memory was read there."""
    token = secrets.randbits(62)
    tokens = [row[0] for row in ring.exchange([token])]
    for base in bases:
        _put(base + ring.rank * _WORD, token.to_bytes(_WORD, "little"))
    ring.exchange([])
    found = _get(bases[ring.rank], ring.size * _WORD)
    ring.exchange([])
    _put(bases[ring.rank], bytes(ring.size * _WORD))
    read = [int.from_bytes(found[at : at + _WORD], "little") for at in range(0, len(found), _WORD)]
    return read == tokens


def _put(address: int, data: bytes) -> None:
    host = bytearray(data)
    _copy(address, _address(host), len(host), _runtime().memcpyHostToDevice)


def _get(address: int, count: int) -> bytes:
    host = bytearray(count)
    _copy(_address(host), address, count, _runtime().memcpyDeviceToHost)
    return bytes(host)


def _copy(to: int, source: int, count: int, kind: int) -> None:
    _runtime().memcpy(to, source, count, kind)
    _runtime().deviceSynchronize()


def _address(host: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(host))
