"""Every error that commlib raises, under one root.

CommError(RuntimeError)
├── FlagError(ValueError)             a flag's name, text or moment is wrong
├── BootstrapError                    no usable rendezvous: environment, store, port
├── RingError(LookupError)            unknown ring, not a member, id taken, closed or failed ring
│   └── RingOrderError                members create their rings in different orders
├── ArgumentError(ValueError)         a call refused on this rank before anything was launched
│   ├── DtypeError(TypeError)
│   │   └── ReductionError(NotImplementedError)
│   ├── ShapeError
│   ├── DeviceError
│   │   └── LayoutError(NotImplementedError)
│   ├── PeerError                     a root or peer outside the ring, or the rank itself
│   └── MismatchError                 the ranks of a ring make different calls (FLAGS_comm_check=2)
├── CapacityError                     an expert got more rows than its capacity
├── CommTimeout(TimeoutError)         a deadline passed; the text names who is late, if known
│   └── PeerTimeout                   a kernel gave a peer up; ring.reset() repairs the ring
├── StreamError                       two streams used one ring's kernels at the same time
├── GraphError                        a function can't be captured, or a graph was used wrongly
└── EngineError                       NCCL, gloo or torch.distributed reported a failure
"""

from typing import Any

__all__ = [
    "ArgumentError",
    "BootstrapError",
    "CapacityError",
    "CommError",
    "CommTimeout",
    "DeviceError",
    "DtypeError",
    "EngineError",
    "FlagError",
    "GraphError",
    "LayoutError",
    "MismatchError",
    "PeerError",
    "PeerTimeout",
    "ReductionError",
    "RingError",
    "RingOrderError",
    "ShapeError",
    "StreamError",
]


def __dir__() -> list[str]:
    """List the public names."""
    return [*__all__]


class CommError(RuntimeError):
    """The root of every error raised by commlib."""


class FlagError(CommError, ValueError):
    """A flag has an unknown name or text, or was changed after it was frozen."""


class BootstrapError(CommError):
    """The ranks can't find each other: environment, store or port is unusable."""


class RingError(CommError, LookupError):
    """The ring is unknown here, has other members or not this rank, or is closed or failed."""

    __str__ = RuntimeError.__str__


class RingOrderError(RingError):
    """Members of two rings create them in different orders."""


class ArgumentError(CommError, ValueError):
    """A call was refused on this rank before anything was launched."""


class DtypeError(ArgumentError, TypeError):
    """The engine can't carry or reduce this dtype; the text says why and what to cast to."""


class ReductionError(DtypeError, NotImplementedError):
    """The engine has this reduction for no dtype; the text says what to call instead."""


class ShapeError(ArgumentError):
    """An element count or dimension does not fit the collective."""


class DeviceError(ArgumentError):
    """A tensor is on another device than its ring, or has no memory that an engine can read."""


class LayoutError(DeviceError, NotImplementedError):
    """A tensor is sparse or has another layout that no engine carries; the text has a remedy."""


class PeerError(ArgumentError):
    """A root or peer is not a position in the ring, or is the calling rank itself."""


class MismatchError(ArgumentError):
    """The ranks of a ring make different calls; the text names both.

    Every level of FLAGS_comm_check raises it for what that level compares.

    At FLAGS_comm_check=2 all ranks raise it before a launch, and the ring stays usable. At level 1
    on the CPUs of one host the late rank launches nothing, and the ring must be made again.
    """


class CapacityError(CommError):
    """An expert got more rows than its capacity; the text names it, its rank and the senders.

    The rows beyond the capacity were dropped. The ring stays usable.
    """


class CommTimeout(CommError, TimeoutError):
    """A deadline passed; the text names the ranks that are late, or says that nothing does."""

    __str__ = RuntimeError.__str__


class PeerTimeout(CommTimeout):
    """A kernel that waited for a peer gave it up; the context stays usable."""


class StreamError(CommError):
    """Two calls of one ring ran at the same time on two streams of one rank."""


class GraphError(CommError):
    """A function can't be captured, or ranks capture different things.

    ``op`` and ``where`` name the operator and the user's line, ``hint`` says what to do; each may
    be None. ``done`` is True where work of the call was done, so that it must not be made again.
    ``reads`` is True where the function reads a value on the host. The error of a verified call
    that differs has the function's ``result``.
    """

    def __init__(
        self,
        text: str,
        *,
        op: str | None = None,
        where: str | None = None,
        hint: str | None = None,
        done: bool = False,
        reads: bool = False,
    ) -> None:
        super().__init__(text)
        self.op, self.where, self.hint = op, where, hint
        self.done, self.reads = done, reads
        self.result: Any = None


class EngineError(CommError):
    """The library below (NCCL, gloo, torch.distributed) reported a failure."""
