"""ServeCore and engines as child processes of this one: for `parrot launch`, tests, benchmarks.

The room owns the processes: their ports, logs, deaths and restarts. It knows servers only by their
module's name, their config file and `/ready`, never by importing them."""

from parrot.cluster.cluster import Cluster
from parrot.cluster.process import ClusterError, ServerProcess

__all__ = ["Cluster", "ClusterError", "ServerProcess"]
