"""Operators of expert parallelism: one per file, and the counts that they agree on."""
