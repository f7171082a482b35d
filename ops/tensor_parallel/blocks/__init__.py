"""Parts that the blocks of tensor parallelism have in common: checks, steps and ends."""
