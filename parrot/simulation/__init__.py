"""Simulation: the real ServeCore and real engine cores on virtual time.

This package simulates time, network latency and the duration of engine steps. Scheduling and
engines are the real code. Clients call the servers' apps inside this process.

from parrot.simulation import SimCluster, run_virtual

async def main() -> float:
    async with SimCluster(num_engines=4) as cluster:
        client = cluster.client()
        session = await client.create_session()
        ...  # client.semantic_call, client.get_var, asyncio.sleep: as with a real service
        cluster.check_integrity()
        return cluster.clock.now()

seconds = run_virtual(main())
"""

from parrot.simulation.cluster import PATIENT, SimCluster
from parrot.simulation.engine import SimEngine
from parrot.simulation.links import Latency, fixed, lan, sampled, wan
from parrot.simulation.loop import Deadlock, LoopClock, VirtualLoop, run_virtual

__all__ = [
    "PATIENT",
    "Deadlock",
    "Latency",
    "LoopClock",
    "SimCluster",
    "SimEngine",
    "VirtualLoop",
    "fixed",
    "lan",
    "run_virtual",
    "sampled",
    "wan",
]
