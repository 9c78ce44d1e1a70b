"""ServeCore and engines as child processes of this one: for `parrot launch`, tests, benchmarks."""

from parrot.cluster.cluster import Cluster
from parrot.cluster.process import ClusterError, ServerProcess

__all__ = ["Cluster", "ClusterError", "ServerProcess"]
