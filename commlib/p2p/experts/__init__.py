"""Channels for rows and for exchanges with experts, and their kernels."""
