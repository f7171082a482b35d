"""Slices that the stages of a pipeline exchange: one operator per file."""
