"""How ranks find each other: the environment, the store, the roll-call, and the host exchange."""
