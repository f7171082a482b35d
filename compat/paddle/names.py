"""The table of legacy names: what a new program writes instead, and names that do not exist here.

``page`` makes ``docs/paddle.md`` of it.
"""

_SAME = "none"
_NO_GRADIENT = "the legacy name has no gradient"
_IN_PLACE = f"{_NO_GRADIENT}, and returns `x`"
_CURRENT_STREAM = f"always on the current stream; {_NO_GRADIENT}"

# Old name: the new one, and what differs.
NEW_NAMES: dict[str, tuple[str, str]] = {
    "DistributedFusedLamb": (
        "ops.DistributedFusedLamb",
        "the constructor of `paddle.incubate`; makes the rings inside and across nodes",
    ),
    "LayerDesc": ("graph.pipeline", "a layer that is built on the rank of its stage only"),
    "PipelineLayer": ("graph.pipeline", "builds, cuts and shares the stages of this rank"),
    "SharedLayerDesc": ("graph.pipeline", "`shared=`; its gradients are added between ranks"),
    "all_gather": ("ops.all_gather", _CURRENT_STREAM),
    "all_reduce": ("ops.all_reduce", f"`reduce_type` is a number; {_CURRENT_STREAM}"),
    "all_to_all": ("ops.all_to_all", _CURRENT_STREAM),
    "all_reduce_": ("ops.all_reduce_", f"`reduce_type` is a number; {_IN_PLACE}"),
    "alltoall": ("ops.all_to_all", _NO_GRADIENT),
    "alltoall_single": ("ops.all_to_all", "input and output are arguments; sizes of parts"),
    "assign_pos": ("ops.assign_pos", "`eff_num_len` is ignored"),
    "barrier": ("ops.barrier", "the legacy name waits on the host, for GPUs too"),
    "broadcast": ("ops.broadcast", _CURRENT_STREAM),
    "broadcast_": ("ops.broadcast_", f"always on the current stream; {_IN_PLACE}"),
    "c_allgather": ("ops.all_gather", f"`nranks` is required; {_NO_GRADIENT}"),
    **{
        f"c_allreduce_{op}": ("ops.all_reduce", f'`op="{op}"`; {_NO_GRADIENT}')
        for op in ("avg", "max", "min", "prod", "sum")
    },
    **{
        f"c_allreduce_{op}_": ("ops.all_reduce_", f'`op="{op}"`; {_IN_PLACE}')
        for op in ("avg", "max", "min", "prod", "sum")
    },
    "c_broadcast": ("ops.broadcast", _NO_GRADIENT),
    "c_broadcast_": ("ops.broadcast_", _IN_PLACE),
    "c_comm_init": ("new_ring", "members are named by endpoints"),
    "c_comm_init_all": ("new_ring", "one device per process, so a ring of one rank"),
    "c_comm_init_multitrainer": ("new_ring", "one device per trainer"),
    "c_concat": ("ops.concat", "`rank` and `nranks` are required"),
    "c_embedding": ("ops.vocab_parallel_embedding", "the table comes first"),
    "c_gen_nccl_id": ("new_ring", "ids travel through the store; checks its arguments only"),
    "c_gen_xccl_id": ("new_ring", "as `c_gen_nccl_id`"),
    "c_identity": ("ops.identity", _SAME),
    "c_identity_": ("ops.identity", "`x` itself, not a copy"),
    **{
        f"c_reduce_{op}": ("ops.reduce", f'`op="{op}"`; the root is `root_id`')
        for op in ("avg", "max", "min", "prod", "sum")
    },
    **{
        f"c_reduce_{op}_": ("ops.reduce_", f'`op="{op}"`; the root is `root_id`')
        for op in ("avg", "max", "min", "prod", "sum")
    },
    "c_reducescatter": ("ops.reduce_scatter", f"`nranks` is required; {_NO_GRADIENT}"),
    "c_scatter": ("ops.scatter", "rows that do not divide are dropped"),
    "c_softmax_with_cross_entropy": (
        "ops.softmax_with_cross_entropy",
        "returns the softmax first, always",
    ),
    "c_softmax_with_multi_label_cross_entropy": (
        "ops.softmax_with_cross_entropy",
        "several labels per row, each with a weight",
    ),
    "c_split": ("ops.split", "`rank` and `nranks` are required; `legacy_grad=`"),
    "c_sync_calc_stream": (
        "torch.cuda.Stream.synchronize",
        "of the current stream",
    ),
    "c_sync_calc_stream_": ("torch.cuda.Stream.synchronize", "as `c_sync_calc_stream`"),
    "c_sync_comm_stream": ("Work.wait", "the host waits for the ring's comm stream"),
    "c_sync_comm_stream_": ("Work.wait", "as `c_sync_comm_stream`"),
    "c_wait_comm": ("Work.wait", "the current stream waits for the comm stream"),
    "c_wait_compute": (
        "torch.cuda.Stream.wait_stream",
        "the comm stream waits for the current stream",
    ),
    "class_center_sample": ("ops.class_center_sample", "`rank` and `nranks` are required"),
    "coalesce_tensor": ("torch.cat", "views of one buffer, each aligned"),
    "comm_init_all": ("new_ring", "as `c_comm_init_all`"),
    "data_norm": ("ops.data_norm", "order and defaults of the legacy attributes"),
    "dist_concat": ("ops.concat", _CURRENT_STREAM),
    "distributed_fused_lamb": ("ops.DistributedFusedLamb", "attributes of the legacy operator"),
    "fused_attention": ("ops.fused_attention", "order and defaults of the legacy attributes"),
    "fused_feedforward": ("ops.fused_feedforward", "order and defaults of the legacy attributes"),
    "fused_multi_head_attention": ("ops.fused_attention", "as `fused_attention`"),
    "fused_multi_transformer": (
        "ops.fused_multi_transformer",
        "lists of weights, one per layer",
    ),
    "global_gather": ("ops.global_gather", _SAME),
    "global_scatter": ("ops.global_scatter", _SAME),
    "limit_by_capacity": ("ops.limit_by_capacity", _SAME),
    "margin_cross_entropy": ("ops.margin_cross_entropy", "returns the softmax first"),
    "moe_combine": ("ops.global_gather", "of this rank's rows; it does not communicate"),
    "moe_gate_dispatch": ("ops.assign_pos", "chooses, drops and copies in one call"),
    "moe_permute": ("ops.assign_pos", "copies the rows too, padded for each expert"),
    "moe_unpermute": ("ops.global_gather", "of this rank's rows; it does not communicate"),
    **{
        f"mp_allreduce_{op}": ("ops.all_reduce", f'`op="{op}"`; {_NO_GRADIENT}')
        for op in ("max", "min", "prod")
    },
    **{
        f"mp_allreduce_{op}_": ("ops.all_reduce_", f'`op="{op}"`; {_IN_PLACE}')
        for op in ("max", "min", "prod")
    },
    "mp_allreduce_sum": ("ops.all_reduce", '`backward="identity"`'),
    "mp_allreduce_sum_": ("ops.all_reduce_", '`backward="identity"`, with a gradient'),
    "number_count": ("ops.number_count", "counts have the dtype of the numbers"),
    "p_recv": ("ops.recv", "returns a new tensor; always on the current stream"),
    "p_recv_array": ("ops.recv", "a list of tensors; their shapes are an argument"),
    "p_send": ("ops.send", "always on the current stream"),
    "p_send_array": ("ops.send", "a list of tensors"),
    "partial_allgather": ("ops.partial_all_gather", "`nranks` and `rank` are required"),
    "partial_allgather_": ("ops.partial_all_gather", "as `partial_allgather`"),
    "partial_concat": ("torch.cat", "of some columns of each tensor"),
    "partial_recv": ("ops.partial_recv", "returns a new tensor"),
    "partial_send": ("ops.partial_send", _SAME),
    "partial_sum": ("torch.add", "of some columns of each tensor"),
    "prune_gate_by_capacity": ("ops.prune_gate_by_capacity", _SAME),
    "random_routing": (
        "ops.random_routing",
        "`topk` must be 2; `_legacy_C_ops` takes `prob`, `topk_value`, `topk_idx`",
    ),
    "recv_v2": ("ops.recv", "returns a new tensor; `dynamic_shape=`"),
    "reduce": ("ops.reduce", f"`reduce_type` is a number; {_CURRENT_STREAM}"),
    "reduce_": ("ops.reduce_", "`reduce_type` is a number; the root is `root_id`"),
    "reduce_scatter": ("ops.reduce_scatter", f"`nranks` is required; {_CURRENT_STREAM}"),
    "send_v2": ("ops.send", "`dynamic_shape=`"),
    "sync_batch_norm": ("torch.nn.SyncBatchNorm", "a function, over a ring"),
    "sync_batch_norm_": ("torch.nn.SyncBatchNorm", "as `sync_batch_norm`, with six results"),
}

_SERVERS = "parameter servers are out of scope: commlib has collectives between equal ranks"

# Legacy names that do not exist here, and why.
NOT_PORTED: dict[str, str] = {
    "c_gen_bkcl_id": "BKCL runs on Kunlun devices, which commlib does not support",
    "distributed_lookup_table": _SERVERS,
    "distributed_push_sparse": _SERVERS,
    "fetch_barrier": _SERVERS,
    "heter_listen_and_serv": _SERVERS,
    "listen_and_serv": _SERVERS,
    "pull_box_sparse": _SERVERS,
    "pull_gpups_sparse": _SERVERS,
    "pull_sparse": _SERVERS,
    "pull_sparse_v2": _SERVERS,
    "push_box_sparse": _SERVERS,
    "push_dense": _SERVERS,
    "push_gpups_sparse": _SERVERS,
    "push_sparse": _SERVERS,
    "push_sparse_v2": _SERVERS,
    "send_and_recv": _SERVERS,
    "send_barrier": _SERVERS,
}
