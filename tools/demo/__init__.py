"""`commlib demo`: the main job on two engines and in two modes, compared."""
