"""What watches a run of a function: memory, generators, collectives, and how it is undone."""
