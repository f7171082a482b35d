"""`commlib bench`: one file per benchmark, and the modules that they share."""
