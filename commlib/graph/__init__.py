"""Any callable as a graph that is replayed: collectives inside, nothing silently wrong."""

from commlib.errors import GraphError
from commlib.graph.capture import capture
from commlib.graph.captured_function import CapturedFunction
from commlib.graph.eager_parts import eager
from commlib.graph.report import report

__all__ = ["CapturedFunction", "GraphError", "capture", "eager", "report"]
