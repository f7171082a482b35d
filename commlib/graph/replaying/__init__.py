"""Captured calls: replayed, verified, and joined with their backwards."""
