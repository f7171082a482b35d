"""Calls of collectives: one call, the log of a ring's calls, their orders, and their reports."""
