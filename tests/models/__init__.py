"""Programs of third-party libraries, each run eagerly and captured, and compared bit for bit."""
