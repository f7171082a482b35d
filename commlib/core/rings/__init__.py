"""Rings by their ids: how programs open them, where they are found, and what they report."""
