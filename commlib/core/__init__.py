"""Rings and their collectives: the manager, the context, dispatch and validation."""
