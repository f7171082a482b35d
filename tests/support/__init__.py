"""Shared code of tests: live ranks, formulas, suites and comparisons."""
