"""One block of memory of every rank of a ring, mapped into all of them."""

import ctypes
import secrets
from functools import partial
from pathlib import Path
from typing import Any

import torch

from commlib.deadlines import Deadline
from commlib.errors import BootstrapError
from commlib.log import log
from commlib.p2p import nvrtc
from commlib.rendezvous.host_exchange import host_number
from commlib.rendezvous.hosts import HostExchange
from commlib.streams import capturing, current_raw

_RANKS, _PAGE = 16, 4096  # as in proof.cu
PROBE = Path(__file__).parent / "csrc" / "proof.cu"
_GRID = nvrtc.Grid(64, 256)


class PeerMemory:
    """``bases[r]`` is the address of rank r's ``nbytes`` zeroed bytes in this process."""

    def __init__(self, hosts: HostExchange, bases: list[int], nbytes: int, name: str) -> None:
        self.bases, self.nbytes, self._ring = bases, nbytes, hosts.identity
        self._store, self._unmapped = hosts.store(name), False

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
            deadline = Deadline(_PATIENCE_S)
            self._store.add("unmapped", 1, deadline)
            deadline.poll(partial(self._alone, deadline))
            _closed.append(self)
            _free_closed()

    def _alone(self, deadline: Deadline) -> bool:
        """Return True if every peer has unmapped this rank's memory."""
        if not self._unmapped and self._store.add("unmapped", 0, deadline) >= self._ring.size:
            self._unmapped = True
            self._store.delete_after("seen", self._ring.size, ["unmapped"])
        return self._unmapped


_PATIENCE_S = 1.0
_closed: list[PeerMemory] = []  # whose peers may still have them mapped


def _free_closed() -> None:
    for memory in list(_closed):
        try:
            alone = memory._alone(Deadline(_PATIENCE_S))
        except BootstrapError as error:  # its store may be gone, so that no member can answer
            log.once("memory that peers may still have mapped stays taken: %s", error)
            continue
        if alone:
            _closed.remove(memory)
            _runtime().free(memory.bases[memory._ring.rank])


def share(hosts: HostExchange, nbytes: int, name: str) -> PeerMemory | str:
    """Allocate ``nbytes`` on every rank and map them everywhere; every member calls it.

    ``name`` identifies the memory within its ring.

    Returns the reason, the same on every rank, when one of them can't: ranks on several hosts, no
    peer access, no memory left, or a capture under way. Every pair of ranks has then proved that
    what one writes the other reads. Blocks the host at most the ring's timeout a step.
    """
    facts = hosts.exchange([host_number(), capturing()])
    if any(busy for _, busy in facts):
        return CAPTURING
    if len({host for host, _ in facts}) > 1:
        return "the ranks are on several hosts"
    with torch.cuda.device(hosts.identity.device):
        _free_closed()
        return _mapped(hosts, nbytes, name)


CAPTURING = "a rank is capturing a graph; a call before the capture sets the channel up"


def _mapped(hosts: HostExchange, nbytes: int, name: str) -> PeerMemory | str:
    ring, base, problem = hosts.identity, 0, ""
    handle = b""
    try:
        base, handle = _allocate(nbytes)
    except Exception as error:  # of any kind: every rank learns of it below
        problem = f"{type(error).__name__}: {error}"
    handles = hosts.exchange_bytes(handle)
    bases = [0] * ring.size
    bases[ring.rank] = base
    if all(handles):
        try:
            for peer, theirs in enumerate(handles):
                if peer != ring.rank:
                    bases[peer] = _open(theirs)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    good = _agree(hosts, all(bases)) and _agree(hosts, _probe_peer_access(hosts, bases, nbytes))
    if good:
        return PeerMemory(hosts, bases, nbytes, name)
    _unmap(bases, ring.rank)
    hosts.exchange([])  # no rank has it mapped any more
    if base:
        _runtime().free(base)
    return f"no peer access between all ranks{problem and ': '}{problem}"


def _runtime() -> Any:
    from cupy.cuda import runtime

    return runtime


def _allocate(nbytes: int) -> tuple[int, bytes]:
    """Return zeroed memory and its handle; torch's allocator could move or unmap its own."""
    base = _runtime().malloc(nbytes)
    try:
        _zero(base, nbytes)
        return base, bytes(_runtime().ipcGetMemHandle(base))
    except Exception:
        _runtime().free(base)
        raise


def _zero(address: int, nbytes: int) -> None:
    _runtime().memset(address, 0, nbytes)
    _runtime().deviceSynchronize()


def _open(handle: bytes) -> int:
    return int(_runtime().ipcOpenMemHandle(handle))


def _unmap(bases: list[int], rank: int) -> None:
    for peer, base in enumerate(bases):
        if base and peer != rank:
            _runtime().ipcCloseMemHandle(base)


def _agree(hosts: HostExchange, good: bool) -> bool:
    return all(row == [1] for row in hosts.exchange([int(good)]))


class _Probe(ctypes.Structure):
    """The arguments of the kernels that probe peer access; as in proof.cu."""

    _fields_ = [
        ("base", ctypes.c_void_p * _RANKS),
        ("token", ctypes.c_uint64 * _RANKS),
        ("pages", ctypes.c_int64),
        ("wrong", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("size", ctypes.c_int),
    ]


def _probe_peer_access(hosts: HostExchange, bases: list[int], nbytes: int) -> bool:
    """Return True if every peer's kernel has read the tokens of each rank's kernel."""
    ring = hosts.identity
    tokens = [row[0] for row in hosts.exchange([secrets.randbits(62)])]
    wrong = nvrtc.HostWord()
    probe = _Probe(pages=nbytes // _PAGE, wrong=wrong.address, rank=ring.rank, size=ring.size)
    probe.base[: ring.size], probe.token[: ring.size] = bases, tokens

    def step(name: str) -> bool:
        """Run a kernel; on failure the other members learn of it at the next exchange."""
        try:
            module = nvrtc.module(PROBE, ring.device.index)
            kernel = nvrtc.function([module], name, ring.device.index)
            nvrtc.Launch(kernel, ring.device.index, _GRID, probe)(current_raw(ring.device.index))
            _runtime().deviceSynchronize()
        except Exception as error:
            log.once("peers can't reach this rank's memory: %s", error)
            return False
        return True

    written = step("write_tokens")
    hosts.exchange([])
    matched = step("find_tokens") and not wrong.word.value
    hosts.exchange([])
    _zero(bases[ring.rank], nbytes)
    return written and matched


def _put(address: int, data: bytes) -> None:
    host = bytearray(data)
    _copy(address, _address(host), len(host), _runtime().memcpyHostToDevice)


def _copy(to: int, source: int, count: int, kind: int) -> None:
    _runtime().memcpy(to, source, count, kind)
    _runtime().deviceSynchronize()


def _address(host: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(host))
