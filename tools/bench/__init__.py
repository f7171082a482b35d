"""`commlib bench`: one file per benchmark, and what all of them share."""
