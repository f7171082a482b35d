"""What captures: a CPU records steps, a GPU a CUDA graph."""
