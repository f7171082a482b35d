"""The collectives: one per file."""
