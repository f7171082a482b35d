"""Backends of capture: a CPU records steps, a GPU records a CUDA graph."""
