"""The engine of GPUs: NCCL through CuPy, and push kernels on one host."""
