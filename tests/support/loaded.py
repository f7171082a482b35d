"""Modules that every rank needs and that take long to load: ``ranks.py`` forks ranks from it.

None of it starts CUDA or threads. A collection in a rank skips all of it: it would visit half a
million objects and copy their pages.
"""

import gc

import hypothesis
import pytest
import torch.distributed

import commlib
from commlib import compat, export, graph
from tests.support import suites
from tests.support.compiler import load_compiler

__all__ = ["commlib", "compat", "export", "graph", "hypothesis", "pytest", "suites", "torch"]

load_compiler()
gc.freeze()
