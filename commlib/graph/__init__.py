"""Any callable as a graph that is replayed: collectives inside, nothing silently wrong."""

from commlib.errors import GraphError
from commlib.graph.capture import capture
from commlib.graph.graphed import Graphed
from commlib.graph.pieces import eager
from commlib.graph.report import report

__all__ = ["GraphError", "Graphed", "capture", "eager", "report"]
