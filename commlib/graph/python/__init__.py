"""Python objects that a function can reach, their contents, and the undo of changes to them."""
