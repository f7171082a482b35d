"""Memory that all ranks of one host share, and the kernels that push data through it."""
