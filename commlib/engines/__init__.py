"""What moves the bytes: NCCL through CuPy, gloo, and process groups of torch.distributed."""
