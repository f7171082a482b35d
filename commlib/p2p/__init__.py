"""Kernels that push straight into the memory of the peers on one host, and the memory they use."""
