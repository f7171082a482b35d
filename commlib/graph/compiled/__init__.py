"""Graphs of compiled code: the backend for ``torch.compile``, and its pass for FX graphs."""
