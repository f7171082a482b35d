"""The legacy operators of Paddle: their names, argument orders, defaults, shape rules and errors.

Every function is one statement over ``commlib.ops`` after the checks of the legacy operator, so
both engines, eager and compiled code give the same bits. ``docs/paddle_differences.md`` lists
where upstream contradicts itself and what was decided here.

Streams. ``use_calc_stream=True`` runs on the caller's current stream. ``use_calc_stream=False``,
the legacy default of most operators, is the raw form: the call is put on the ring's comm stream and
no event ties it to the current stream, neither before nor after. The program orders them with
``c_sync_calc_stream`` or ``c_wait_compute`` before, and ``c_sync_comm_stream`` or ``c_wait_comm``
after. Calls that carry a gradient, calls under ``torch.compile`` and everything on a CPU are
ordered anyway.

Gradients. Only operators with a gradient in Paddle have one: ``mp_allreduce_sum``, ``c_identity``
and their forms in place, ``c_concat``, ``c_split``, ``c_embedding``, ``global_scatter``,
``global_gather``, ``data_norm``, ``sync_batch_norm``, ``c_softmax_with_cross_entropy``,
``c_softmax_with_multi_label_cross_entropy``, ``margin_cross_entropy``, ``fused_attention``,
``fused_feedforward``, ``partial_concat``, ``partial_sum``, ``moe_*``. The others cut it, as
upstream does; their namesakes in ``commlib.ops`` differentiate.

Styles. ``_C_ops`` and ``_legacy_C_ops`` have the same operators: the first is this module, the
second takes pairs of an attribute's name and its value after the tensors.

Empty tensors are allowed everywhere; nothing is launched for them. ``nranks`` is the size of the
ring wherever it is an argument, on both engines.
"""

import sys
from typing import TYPE_CHECKING, Any

from commlib.compat.paddle import distributed as distributed
from commlib.compat.paddle.attributes import AttributeCalls
from commlib.compat.paddle.blocks import (
    fused_attention,
    fused_feedforward,
    fused_multi_head_attention,
)
from commlib.compat.paddle.distributed.collectives import alltoall_single
from commlib.compat.paddle.experts import global_gather, global_scatter
from commlib.compat.paddle.in_place import (
    c_broadcast_,
    c_identity_,
    c_sync_calc_stream_,
    c_sync_comm_stream_,
    mp_allreduce_sum_,
    partial_allgather_,
)
from commlib.compat.paddle.inference import fused_multi_transformer
from commlib.compat.paddle.losses import (
    c_softmax_with_cross_entropy,
    c_softmax_with_multi_label_cross_entropy,
    margin_cross_entropy,
)
from commlib.compat.paddle.moe import (
    assign_pos,
    limit_by_capacity,
    number_count,
    prune_gate_by_capacity,
    random_routing,
)
from commlib.compat.paddle.moves import alltoall, c_allgather, c_broadcast, c_scatter
from commlib.compat.paddle.mp_reductions import (
    mp_allreduce_max,
    mp_allreduce_max_,
    mp_allreduce_min,
    mp_allreduce_min_,
    mp_allreduce_prod,
    mp_allreduce_prod_,
)
from commlib.compat.paddle.normalization import data_norm, sync_batch_norm
from commlib.compat.paddle.optimizers import DistributedFusedLamb, distributed_fused_lamb
from commlib.compat.paddle.partial import partial_allgather, partial_recv, partial_send
from commlib.compat.paddle.permutations import moe_permute, moe_unpermute
from commlib.compat.paddle.phi import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    dist_concat,
    p_recv,
    p_recv_array,
    p_send,
    p_send_array,
    reduce,
    reduce_scatter,
)
from commlib.compat.paddle.phi_in_place import all_reduce_, broadcast_, reduce_, sync_batch_norm_
from commlib.compat.paddle.pipeline import LayerDesc, PipelineLayer, SharedLayerDesc
from commlib.compat.paddle.point_to_point import recv_v2, send_v2
from commlib.compat.paddle.reductions import (
    c_allreduce_avg,
    c_allreduce_max,
    c_allreduce_min,
    c_allreduce_prod,
    c_allreduce_sum,
    c_reducescatter,
)
from commlib.compat.paddle.reductions_in_place import (
    c_allreduce_avg_,
    c_allreduce_max_,
    c_allreduce_min_,
    c_allreduce_prod_,
    c_allreduce_sum_,
    c_reduce_avg_,
    c_reduce_max_,
    c_reduce_min_,
    c_reduce_prod_,
    c_reduce_sum_,
)
from commlib.compat.paddle.rings import (
    c_comm_init,
    c_comm_init_all,
    c_comm_init_multitrainer,
    c_gen_nccl_id,
    c_gen_xccl_id,
    comm_init_all,
)
from commlib.compat.paddle.root_reductions import (
    c_reduce_avg,
    c_reduce_max,
    c_reduce_min,
    c_reduce_prod,
    c_reduce_sum,
)
from commlib.compat.paddle.sampling import class_center_sample
from commlib.compat.paddle.slices import coalesce_tensor, partial_concat, partial_sum
from commlib.compat.paddle.streams import (
    barrier,
    c_sync_calc_stream,
    c_sync_comm_stream,
    c_wait_comm,
    c_wait_compute,
)
from commlib.compat.paddle.tensor_parallel import (
    c_concat,
    c_embedding,
    c_identity,
    c_split,
    mp_allreduce_sum,
)
from commlib.compat.paddle.token_moves import (
    moe_combine,
    moe_gate_dispatch,
)
from commlib.compat.paddle.unported import unported

__all__ = [
    "DistributedFusedLamb",
    "LayerDesc",
    "PipelineLayer",
    "SharedLayerDesc",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "alltoall",
    "alltoall_single",
    "assign_pos",
    "barrier",
    "broadcast",
    "broadcast_",
    "c_allgather",
    "c_allreduce_avg",
    "c_allreduce_avg_",
    "c_allreduce_max",
    "c_allreduce_max_",
    "c_allreduce_min",
    "c_allreduce_min_",
    "c_allreduce_prod",
    "c_allreduce_prod_",
    "c_allreduce_sum",
    "c_allreduce_sum_",
    "c_broadcast",
    "c_broadcast_",
    "c_comm_init",
    "c_comm_init_all",
    "c_comm_init_multitrainer",
    "c_concat",
    "c_embedding",
    "c_gen_nccl_id",
    "c_gen_xccl_id",
    "c_identity",
    "c_identity_",
    "c_reduce_avg",
    "c_reduce_avg_",
    "c_reduce_max",
    "c_reduce_max_",
    "c_reduce_min",
    "c_reduce_min_",
    "c_reduce_prod",
    "c_reduce_prod_",
    "c_reduce_sum",
    "c_reduce_sum_",
    "c_reducescatter",
    "c_scatter",
    "c_softmax_with_cross_entropy",
    "c_softmax_with_multi_label_cross_entropy",
    "c_split",
    "c_sync_calc_stream",
    "c_sync_calc_stream_",
    "c_sync_comm_stream",
    "c_sync_comm_stream_",
    "c_wait_comm",
    "c_wait_compute",
    "class_center_sample",
    "coalesce_tensor",
    "comm_init_all",
    "data_norm",
    "dist_concat",
    "distributed_fused_lamb",
    "fused_attention",
    "fused_feedforward",
    "fused_multi_head_attention",
    "fused_multi_transformer",
    "global_gather",
    "global_scatter",
    "limit_by_capacity",
    "margin_cross_entropy",
    "moe_combine",
    "moe_gate_dispatch",
    "moe_permute",
    "moe_unpermute",
    "mp_allreduce_max",
    "mp_allreduce_max_",
    "mp_allreduce_min",
    "mp_allreduce_min_",
    "mp_allreduce_prod",
    "mp_allreduce_prod_",
    "mp_allreduce_sum",
    "mp_allreduce_sum_",
    "number_count",
    "p_recv",
    "p_recv_array",
    "p_send",
    "p_send_array",
    "partial_allgather",
    "partial_allgather_",
    "partial_concat",
    "partial_recv",
    "partial_send",
    "partial_sum",
    "prune_gate_by_capacity",
    "random_routing",
    "recv_v2",
    "reduce",
    "reduce_",
    "reduce_scatter",
    "send_v2",
    "sync_batch_norm",
    "sync_batch_norm_",
]


def __dir__() -> list[str]:
    """List the public names, and the module of ``paddle.distributed``."""
    return [*__all__, "distributed"]


if TYPE_CHECKING:
    _C_ops: Any
    _legacy_C_ops: AttributeCalls
else:  # a checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Return a style of calls; the error for another name says what there is instead."""
        this = sys.modules[__name__]
        if name == "_C_ops":
            return this
        if name == "_legacy_C_ops":
            return AttributeCalls(this)
        raise unported(__name__, __all__, name)
