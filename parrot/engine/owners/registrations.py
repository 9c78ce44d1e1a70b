"""The registrations of an engine with all the ServeCores that share it."""

import asyncio
from collections.abc import Sequence

from parrot.engine.config import EngineConfig
from parrot.engine.core.plan import DeviceLost
from parrot.engine.heartbeat import Heartbeat
from parrot.engine.owners.owners import Owners
from parrot.protocol.failover_client import client_of
from parrot.protocol.serve_client import RegistrationClient
from parrot.utils.clock import MonotonicClock


class Registrations:
    """Keeps an engine registered with each of its ServeCores, of which none waits for another."""

    def __init__(self, heartbeats: Sequence[Heartbeat]) -> None:
        self._heartbeats = heartbeats

    async def run(self) -> None:
        """Returns when no ServeCore knows an engine any more that leaves. Raises `DeviceLost`."""
        try:
            async with asyncio.TaskGroup() as group:
                for heartbeat in self._heartbeats:
                    group.create_task(heartbeat.run())
        except* DeviceLost as lost:
            raise lost.exceptions[0] from None

    async def leave(self, timeout_s: float) -> None:
        """See `Heartbeat.leave`."""
        await asyncio.gather(*(heartbeat.leave(timeout_s) for heartbeat in self._heartbeats))

    async def close(self) -> None:
        for heartbeat in self._heartbeats:
            await heartbeat.close()


def registration(config: EngineConfig, owners: Owners, incarnation: str = "") -> Registrations:
    """Prepare to keep the engine registered with the config's ServeCores."""
    heartbeats = []
    for owner, group in zip(owners, config.core_groups, strict=True):
        cores = [(core.host, core.port) for core in group]
        urls = [f"http://{host}:{port}" for host, port in cores]
        heartbeats.append(
            Heartbeat(
                RegistrationClient(client_of(urls, bearer_token=config.cluster_token)),
                owner.service,
                owner.reorder,
                owner.fence,
                MonotonicClock(),
                interval_s=config.beat_s,
                cores=cores,
                incarnation=incarnation,
                share=owner.share,
            )
        )
    return Registrations(heartbeats)
