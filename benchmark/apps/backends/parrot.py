"""ServeCore, in the two styles in which programs use it."""

import asyncio
from collections.abc import Sequence

from benchmark.apps.counters import CountedBackend, Scrape
from parrot.cli.bench.program import Call, Network, Output
from parrot.cli.bench.styles import (
    Data,
    GraphProgram,
    Session,
    WaitingProgram,
    close_session,
    submit_call,
)
from parrot.protocol.serve_client import ServeClient


def parrot_backend(
    client: ServeClient, scrape: Scrape, network: Network, *, whole_graph: bool
) -> CountedBackend:
    """`whole_graph`: programs submit their graphs; otherwise one request after the other."""
    kind = GraphProgram if whole_graph else RequestProgram
    return CountedBackend(lambda app: kind(client, network, app), client.close, scrape)


class RequestProgram(WaitingProgram):
    """ServeCore as a server of single requests: each call is a session of its own, so nothing of
    the graph is known. What an OpenAI client costs, one round trip, is what it costs here."""

    def __init__(self, client: ServeClient, network: Network, app: str) -> None:
        super().__init__()
        self._client = client
        self._network = network
        self._app = app
        self._releases: list[asyncio.Task[None]] = []

    async def _complete(self, call: Call, texts: Sequence[str]) -> str:
        inputs = {
            piece: Data(text)
            for piece, text in zip(call.prompt, texts, strict=True)
            if isinstance(piece, Output)
        }
        async with self._network.trip() as way_s:
            session = await Session.begin(self._client, self._app)
            try:
                var = await submit_call(session, call, inputs)
                if call.streamed:
                    times = await session.stream(var)
                    self.account.streams[call.output] = times.later(way_s)
                return await session.read(var)
            finally:
                self._releases.append(self._loop.create_task(self._release(session)))

    async def end(self) -> None:
        await super().end()
        await asyncio.gather(*self._releases)

    async def _release(self, session: Session) -> None:
        self.account.usages += await close_session(session)
