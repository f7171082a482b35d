"""The tests; a package, so that every spawned rank can import them."""
