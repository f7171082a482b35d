"""Benchmarks of the backend "commlib" of torch.distributed against torch's own backends."""
