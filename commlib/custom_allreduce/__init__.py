"""Collectives by kernels that push straight into the memory of the peers on one host."""
