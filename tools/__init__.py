"""The entrance for people: `commlib demo`, `commlib doctor`, `commlib bench`."""
