"""The values that a function uses in addition to its arguments, and the watch over them."""
