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

Gradients. Only operators with a gradient in Paddle have one: ``mp_allreduce_sum``, ``c_identity``,
``c_concat``, ``c_split``, ``c_embedding``, ``global_scatter``, ``global_gather``, ``data_norm``,
``c_softmax_with_cross_entropy``, ``margin_cross_entropy``, ``fused_attention``,
``fused_feedforward``. The others cut it, as upstream does;
their namesakes in ``commlib.ops`` differentiate.

Empty tensors are allowed everywhere; nothing is launched for them. ``nranks`` is the size of the
ring wherever it is an argument, on both engines.
"""

from commlib.compat.paddle import distributed as distributed
from commlib.compat.paddle.blocks import fused_attention, fused_feedforward
from commlib.compat.paddle.experts import global_gather, global_scatter
from commlib.compat.paddle.inference import fused_multi_transformer
from commlib.compat.paddle.losses import c_softmax_with_cross_entropy, margin_cross_entropy
from commlib.compat.paddle.moe import (
    assign_pos,
    limit_by_capacity,
    number_count,
    prune_gate_by_capacity,
    random_routing,
)
from commlib.compat.paddle.moves import alltoall, c_allgather, c_broadcast, c_scatter
from commlib.compat.paddle.normalization import data_norm
from commlib.compat.paddle.optimizers import distributed_fused_lamb
from commlib.compat.paddle.partial import partial_allgather, partial_recv, partial_send
from commlib.compat.paddle.point_to_point import recv_v2, send_v2
from commlib.compat.paddle.reductions import (
    c_allreduce_max,
    c_allreduce_min,
    c_allreduce_prod,
    c_allreduce_sum,
    c_reduce_max,
    c_reduce_min,
    c_reduce_prod,
    c_reduce_sum,
    c_reducescatter,
)
from commlib.compat.paddle.rings import c_comm_init, c_gen_nccl_id
from commlib.compat.paddle.sampling import class_center_sample
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

__all__ = [
    "alltoall",
    "assign_pos",
    "barrier",
    "c_allgather",
    "c_allreduce_max",
    "c_allreduce_min",
    "c_allreduce_prod",
    "c_allreduce_sum",
    "c_broadcast",
    "c_comm_init",
    "c_concat",
    "c_embedding",
    "c_gen_nccl_id",
    "c_identity",
    "c_reduce_max",
    "c_reduce_min",
    "c_reduce_prod",
    "c_reduce_sum",
    "c_reducescatter",
    "c_scatter",
    "c_softmax_with_cross_entropy",
    "c_split",
    "c_sync_calc_stream",
    "c_sync_comm_stream",
    "c_wait_comm",
    "c_wait_compute",
    "class_center_sample",
    "data_norm",
    "distributed_fused_lamb",
    "fused_attention",
    "fused_feedforward",
    "fused_multi_transformer",
    "global_gather",
    "global_scatter",
    "limit_by_capacity",
    "margin_cross_entropy",
    "mp_allreduce_sum",
    "number_count",
    "partial_allgather",
    "partial_recv",
    "partial_send",
    "prune_gate_by_capacity",
    "random_routing",
    "recv_v2",
    "send_v2",
]
