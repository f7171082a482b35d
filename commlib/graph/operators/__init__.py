"""Operators of torch as a run sees them: their facts, their steps, and what no graph can hold."""
