"""The memory of an expert channel, and what its kernels are given."""

import ctypes

from commlib.p2p.experts.tables import GROUP, ExpertSpec
from commlib.p2p.kernel_table import VECTOR

KINDS = ("expert_dispatch", "expert_combine")  # of calls
DISPATCH, COMBINE = range(len(KINDS))
RANKS, EXPERTS, CHOICES, SLOTS = 16, 1024, 32, 4096  # as in experts.cuh
INVERSE = 20  # bits of ExpertCall.inverse after the point; as in experts.cuh
CALLS, LIMIT = 128, 136  # offsets of the number of calls and of limit_ns, in bytes
_CONTROL, _WORD = 4096, 8  # bytes of control words, and of a word
_LINE = 128  # bytes; slots and rows begin at one
_HALVES = 2  # of counts, flags and slots: calls use them in turn
_COUNTERS = EXPERTS + RANKS


class ExpertCall(ctypes.Structure):
    """The arguments of a kernel; as in experts.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "out", "scales", "ids", "weights", "active")),
        *((name, ctypes.c_void_p) for name in ("expert_ids", "positions", "sources")),
        *((name, ctypes.c_void_p) for name in ("row_weights", "counts", "demand")),
        ("base", ctypes.c_void_p * RANKS),
        ("error", ctypes.c_void_p),
        ("overflow", ctypes.c_void_p),
        *((f"first_{name}", ctypes.c_int64) for name in ("count", "flag", "freed", "used")),
        *((name, ctypes.c_int64) for name in ("first_slot", "share", "slot")),
        *((name, ctypes.c_int) for name in ("slots", "rank", "size", "tokens", "choices")),
        *((name, ctypes.c_int) for name in ("experts", "local", "capacity", "row", "wide")),
        *((name, ctypes.c_int) for name in ("weighted", "pushers", "inverse")),
    ]


class OverflowRecord(ctypes.Structure):
    """The record of an expert beyond its capacity; as in experts.cuh."""

    _fields_ = [
        ("state", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("expert", "owner", "capacity", "unused")),
        ("by_rank", ctypes.c_uint32 * RANKS),
    ]


class Layout:
    """The layout of each rank's memory: offsets in bytes."""

    def __init__(self, size: int, room: int) -> None:
        words = size * SLOTS * _WORD  # one per slot
        self.count = _CONTROL
        self.flag = self.count + _HALVES * size * _COUNTERS * _WORD
        self.freed = self.flag + _HALVES * words
        self.used = self.freed + words
        self.slot = _in_lines(self.used + words)
        self.share = room // _HALVES // size // _LINE * _LINE  # of one pair of ranks, in one half
        self.nbytes = self.slot + _HALVES * self.share * size


def slot_bytes(kind: int, spec: ExpertSpec) -> int:
    """Return the bytes of one row on its way: with its header, or as a sum in float32."""
    if kind == COMBINE:
        return _in_lines(spec.width * 4)
    row = spec.width * spec.dtype.itemsize
    if spec.quantize:
        row = spec.width + spec.width // GROUP * 4
    return _in_lines((spec.top_k + 1) * VECTOR) + _in_lines(row)


def _in_lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
