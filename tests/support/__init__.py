"""What tests share: live ranks, formulas, suites and comparisons."""
