"""Operators of tensor parallelism: one per file."""
