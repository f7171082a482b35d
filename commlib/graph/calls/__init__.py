"""A call of a captured function: its key, its results, the names and gradients that it binds."""
