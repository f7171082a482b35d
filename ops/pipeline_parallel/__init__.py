"""Operators of pipeline parallelism: slices that stages exchange, one operator per file."""
