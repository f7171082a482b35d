"""Registered ops: what torch.compile traces, autograd differentiates and vmap batches."""
