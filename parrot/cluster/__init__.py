"""ServeCore and engines as child processes, for `parrot launch`, tests and benchmarks.

This package manages the processes: their ports, logs, crashes and restarts. It does not import the
servers. It uses only the name of their module, their config file and `/ready`."""

from parrot.cluster.cluster import Cluster
from parrot.cluster.process import ClusterError, ServerProcess

__all__ = ["Cluster", "ClusterError", "ServerProcess"]
