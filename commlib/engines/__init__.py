"""Engines, which move the bytes: NCCL through CuPy, gloo, groups of torch.distributed."""
