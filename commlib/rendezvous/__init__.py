"""The rendezvous of ranks: environment, store, roll-call and host exchange."""
