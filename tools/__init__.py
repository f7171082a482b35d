"""Command line of commlib: `commlib demo`, `doctor`, `flags` and `bench`."""
