"""Observers of a run of a function: memory, generators, collectives, and its undo."""
