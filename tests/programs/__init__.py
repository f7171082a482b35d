"""Programs that tests start in their own processes."""
