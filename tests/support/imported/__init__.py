"""A package of settings that tests import in captured functions."""

scale = 1.0
