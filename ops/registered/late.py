"""Families of operators that are imported when they are first used, and the ops they register.

`import commlib` would take half as long again with them. `commlib.export` imports them all: a C++
loader looks an op up without Python.
"""

from importlib import import_module
from typing import Any

import torch

_FAMILIES = {
    "classification": (
        "class_center_sample",
        "margin_cross_entropy",
        "softmax_with_cross_entropy",
    ),
    "expert_parallel": (
        "assign_pos",
        "expert_combine",
        "expert_dispatch",
        "global_gather",
        "global_scatter",
        "limit_by_capacity",
        "number_count",
        "prune_gate_by_capacity",
        "random_routing",
    ),
    "inference": ("fused_multi_transformer",),
}
OPERATORS = {  # name in commlib.ops: module
    **{name: f"commlib.ops.{room}._{name}" for room, names in _FAMILIES.items() for name in names},
    "DistributedFusedLamb": "commlib.ops.lamb.optimizer",
    "data_norm": "commlib.ops.normalisation._data_norm",
}
_OPS = {  # module that registers them: names in torch.ops.commlib
    "normalisation._data_norm": ("data_norm", "data_norm_grad", "data_norm_update"),
    "classification._class_center_sample": ("class_center_sample", "class_center_sample_cut"),
    "classification._margin_cross_entropy": ("margin_cross_entropy", "margin_cross_entropy_grad"),
    "classification._softmax_with_cross_entropy": (
        "softmax_with_cross_entropy",
        "softmax_with_cross_entropy_grad",
    ),
    "expert_parallel._assign_pos": ("assign_pos",),
    "expert_parallel._expert_combine": ("expert_combine", "expert_combine_gradients"),
    "expert_parallel._expert_dispatch": ("expert_dispatch",),
    "expert_parallel._global_gather": ("from_experts",),
    "expert_parallel._global_scatter": ("to_experts",),
    "expert_parallel.counted_rows": ("counted_tables",),
    "expert_parallel.moves": ("expert_rows", "expert_sums"),
    "expert_parallel.row_counts": ("agreed_counts",),
    "inference.decode_attention": ("decode_attention",),
    "inference.dense_linear": ("dense_linear",),
    "inference.gated_silu": ("gated_silu",),
    "inference.quantized_linear": ("quantized_linear",),
}
OPS = {op: f"commlib.ops.{module}" for module, ops in _OPS.items() for op in ops}


class Namespace(torch._ops._OpNamespace):
    """`torch.ops.commlib`: a look-up of a missing op imports its operator first."""

    __module__ = torch._ops._OpNamespace.__module__  # generated code names ops by it

    def __getattr__(self, op_name: str) -> Any:
        if op_name in OPS:
            import_module(OPS[op_name])
        return super().__getattr__(op_name)


def import_all() -> None:
    """Import every operator, which registers its ops."""
    for module in OPERATORS.values():
        import_module(module)
