"""`commlib demo`: one program on two engines, eager and compiled, compared bit by bit."""
