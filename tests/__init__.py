"""The tests; a package, so that every rank can import them."""
