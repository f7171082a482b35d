"""Normalisation by statistics that the ranks gather over a training run."""
