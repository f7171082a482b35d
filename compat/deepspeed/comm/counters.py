"""Counters of calls and bytes by the name that a call logs under; no device is waited for."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist

from commlib.errors import ArgumentError


@dataclass
class Count:
    """Calls of one name with one size of tensors."""

    calls: int = 0
    bytes: int = 0


@dataclass
class Counters:
    """Counters of the calls that ``configure`` selects: nothing, all calls, or some names.

    Attributes:
        enabled: False counts nothing.
        all: True counts every call.
        names: Calls that are counted in any case, by the name that they log under.
        found: Counts by name and size.
    """

    enabled: bool = False
    all: bool = True
    names: Collection[str] = ()
    found: dict[tuple[str, int], Count] = field(default_factory=dict)

    def count(self, name: str, tensors: Sequence[torch.Tensor | None], asked: bool) -> None:
        """Count one call.

        Args:
            name: The name that the call logs under.
            tensors: Tensors whose bytes are counted.
            asked: True if the call itself asks to be counted.
        """
        if not self.enabled or not (asked or self.all or name in self.names):
            return
        size = sum(x.numel() * x.element_size() for x in tensors if x is not None)
        one = self.found.setdefault((name, size), Count())
        one.calls += 1
        one.bytes += size

    def start_profiling_comms(self) -> None:
        """Count every call from now on, if counting is enabled."""
        self.all = True

    def stop_profiling_comms(self) -> None:
        """Count only the calls that ask for it, and those of ``start_profiling_op``."""
        self.all = False

    def start_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Count calls that log under these names too."""
        self.names = frozenset(self.names) | frozenset(op_name_list)

    def stop_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Count calls that log under these names no longer."""
        self.names = frozenset(self.names) - frozenset(op_name_list)

    def table(self) -> str:
        """Return the counts, one line per name and size."""
        rows = [("name", "bytes of a call", "calls", "bytes in all")]
        rows += [
            (name, str(size), str(one.calls), str(one.bytes))
            for (name, size), one in sorted(self.found.items())
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)


counters = Counters()
# What a summary has in DeepSpeed, and what a host would have to wait for.
_TIMES = ("total_latency_ms", "avg_latency_ms", "tput_avg_gbps", "busbw_avg_gbps")


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Select the calls that are counted; None keeps what was selected.

    Args:
        deepspeed_config: An object with ``comms_config``, or a dict with "comms_logger".
        enabled: Count at all.
        prof_all: Count every call.
        prof_ops: Names of calls that are counted, as ``log_name`` gives them.
        verbose: Ignored.
        debug: Ignored.
    """
    settings = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops}
    chosen = _chosen(deepspeed_config)
    chosen.update((name, value) for name, value in settings.items() if value is not None)
    counters.enabled = chosen.get("enabled", counters.enabled)
    counters.all = chosen.get("prof_all", counters.all)
    counters.names = frozenset(chosen.get("prof_ops", counters.names))


def _chosen(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, dict):
        return dict(config.get("comms_logger", {}))
    logger = getattr(config.comms_config, "comms_logger", None)
    settings = {name: getattr(logger, name, None) for name in ("enabled", "prof_all", "prof_ops")}
    return {name: value for name, value in settings.items() if value is not None}


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the calls and bytes of this rank on rank 0.

    Args:
        show_straggler: Must be False: the time that a rank waits for others is not measured.
        return_dict: True also returns the counts.

    Returns:
        None, or with ``return_dict=True`` a dict: "summary" has "count" and "msg_size_bytes" by
        name and size, with None for all times, "straggler_analysis" is None, and "metadata" has
        "world_size", "rank" and "timestamp".

    Raises:
        ArgumentError: ``show_straggler`` is True.
    """
    if show_straggler:
        raise ArgumentError(
            "log_summary(show_straggler=True): calls are not timed, because that would make the "
            "host wait for the device; pass False, and use FLAGS_comm_check=1 to name late ranks"
        )
    is_one = not dist.is_initialized()
    if is_one or dist.get_rank() == 0:
        print(counters.table())
    if not return_dict:
        return None
    summary: dict[str, dict[int, dict[str, int | None]]] = {}
    for (name, size), one in counters.found.items():
        stats = {"count": one.calls, "msg_size_bytes": size}
        summary.setdefault(name, {})[size] = stats | dict.fromkeys(_TIMES)
    metadata = {
        "world_size": 1 if is_one else dist.get_world_size(),
        "rank": 0 if is_one else dist.get_rank(),
        "timestamp": datetime.now().isoformat(),
    }
    return {"summary": summary, "straggler_analysis": None, "metadata": metadata}


def has_comm_data() -> bool:
    """Return True if a call was counted."""
    return bool(counters.found)


def get_comm_operation_count() -> int:
    """Return how many calls were counted."""
    return sum(one.calls for one in counters.found.values())


def get_logged_comm_ops() -> list[str]:
    """Return the names of the calls that were counted."""
    return [*dict.fromkeys(name for name, _ in counters.found)]


def reset_log() -> None:
    """Forget the calls that were counted."""
    counters.found.clear()
