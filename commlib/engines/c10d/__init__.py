"""The engines over process groups of torch: gloo, and the groups of torch.distributed."""
