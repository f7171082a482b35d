"""Losses and samples over classes that are spread over the ranks, and their row kernels."""
