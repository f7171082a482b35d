"""The collectives of a ring, by family: each validates its call once, and dispatches it."""
