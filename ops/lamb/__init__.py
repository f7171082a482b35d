"""The LAMB optimizer with sharded state: layout, buffers, rings, update and checkpoints."""
