"""A ServeCore with its journal, its engines, and the links between them and to the programs."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from benchmark.nemesis.history import Account
from benchmark.nemesis.link import Link
from benchmark.nemesis.servers import ACCOUNT, Server, WallClock, run_core, run_engine
from parrot.cluster.ports import ask, free_port

TENANTS = ("tenant-a", "tenant-b")
QUEUE = 16  # tasks: so few that tenants are refused when engines are gone
CORE: dict[str, Any] = {
    "api_keys": TENANTS,
    "cluster_token": "of-the-nemesis",
    "engine_heartbeat_timeout": 2.0,
    "no_engine_timeout": 120.0,
    "session_life_span": 120.0,
    "constant_prefix_var_timeout": 1.0,
    "page": False,
    "global_scheduler": {"reuse_timeout": 1.0, "max_queue_size": QUEUE},
}
SIM: dict[str, Any] = {
    "engine_type": "sim",
    "model": "sim",
    "heartbeat_interval": 0.2,
    "tasks_capacity": 2,
    "instance": {"step_s": 0.004, "num_kv_cache_blocks": 2048},
}
EMBEDDED: dict[str, Any] = {
    "engine_type": "builtin",
    "model": "embedded",
    "served_model_name": "sim",
    "dtype": "float32",
    "heartbeat_interval": 0.2,
    "instance": {"block_size": 16, "num_kv_cache_blocks": 1024, "num_threads": 1},
}
_READY_S = 120.0
_LOOK_S = 0.02


class EngineLinks:
    """The two links of an engine: ServeCore's to it, and its own to ServeCore."""

    def __init__(self, to_engine: Link, to_core: Link) -> None:
        self.to_engine, self.to_core = to_engine, to_core


class Service:
    """Use what `running` gives. Servers that are disturbed are held by `held`, so that nobody else
    does so at the same time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = WallClock(folder / "clock")
        self.core: Server
        self.client_link: Link
        self.engines: dict[str, Server] = {}
        self.links: dict[str, EngineLinks] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._ports: set[int] = set()
        self.engine_config: dict[str, Any] = {}
        self.kills: Counter[str] = Counter()  # of ServeCore and of engines, by faults

    @property
    def url(self) -> str:
        """Where programs ask."""
        return f"http://127.0.0.1:{self.client_link.port}"

    def lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def new_port(self) -> int:
        return free_port("127.0.0.1", self._ports)

    def engine(self, name: str, port: int, beat: int, advertised: int) -> Server:
        """An engine's process, not started: it listens at `port`, asks ServeCore at `beat`."""
        core = {"host": "127.0.0.1", "port": beat}
        config = {"engine_name": name, "host": "127.0.0.1", "port": port, "serve_core": core}
        config |= {"cluster_token": CORE["cluster_token"]}
        facts = (str(self.clock.path), advertised)
        return Server(name, run_engine, self.engine_config | config, self.folder, *facts)

    @asynccontextmanager
    async def running(
        self, num_engines: int, engine: Mapping[str, Any], **core: Any
    ) -> AsyncIterator[None]:
        """All of it, ready; killed in the end."""
        self.engine_config = dict(engine)
        async with AsyncExitStack() as stack:
            port = self.new_port()
            journal = {"journal": str(self.folder / "journal"), "state_dir": str(self.folder)}
            config = {**CORE, **journal, "host": "127.0.0.1", "port": port, **core}
            self.core = Server("serve-core", run_core, config, self.folder, str(self.clock.path))
            self.client_link = await stack.enter_async_context(Link(port))
            for number in range(num_engines):
                name, own = f"engine-{number}", self.new_port()
                to_engine = await stack.enter_async_context(Link(own))
                to_core = await stack.enter_async_context(Link(port))
                self.links[name] = EngineLinks(to_engine, to_core)
                self.engines[name] = self.engine(name, own, to_core.port, to_engine.port)
            try:
                self.core.start()
                for server in self.engines.values():
                    server.start()
                await self.ready()
                yield
            finally:
                for server in (self.core, *self.engines.values()):
                    await server.kill()

    async def ready(self) -> None:
        """Wait until ServeCore has all engines. Raises `TimeoutError` with the ends of the logs."""
        try:
            async with asyncio.timeout(_READY_S):
                while not (await asyncio.to_thread(self._live)).issuperset(self.engines):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise TimeoutError(f"not ready in {_READY_S:g} s:\n{self.logs()}") from None

    def _live(self) -> set[str]:
        token, port = CORE["cluster_token"], self.core.config["port"]
        answer = ask("127.0.0.1", port, "/ready", token=token, timeout_s=1.0)
        if answer is None or answer[0] != 200:
            return set()
        return {engine["engine_name"] for engine in answer[1]["engines"]}

    def logs(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        tails = ((log.name, log.read_text(errors="replace").splitlines()[-15:]) for log in logs)
        return "\n".join("\n".join([f"--- {name}", *lines]) for name, lines in tails)

    def errors(self) -> Iterator[str]:
        """Yield the first lines of tracebacks in the logs: defects, whatever programs saw."""
        for log in sorted(self.folder.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            for number, line in enumerate(lines):
                if line.startswith("Traceback"):
                    tail = lines[number : number + 40]
                    yield f"{log.name}: {' / '.join(line.strip() for line in tail)}"

    async def kill(self, *servers: Server) -> None:
        """`kill -9`, all at once; returns when they are gone."""
        self.kills.update("core" if server is self.core else "engine" for server in servers)
        await asyncio.gather(*(server.kill() for server in servers))

    # Accounts

    async def account(self, server: Server) -> dict[str, Any]:
        """What the server says of its books; `broken` if it says nothing."""
        answer = await asyncio.to_thread(
            ask, "127.0.0.1", server.config["port"], ACCOUNT, 10.0, CORE["cluster_token"]
        )
        if answer is None or answer[0] != 200:
            return {"broken": f"no account: {answer}"}
        account: dict[str, Any] = answer[1]
        return account

    async def settled(self, patience_s: float, *, without_sessions: bool) -> list[Account]:
        """The accounts of all servers, once nothing runs, each engine has the contexts that
        ServeCore believes to be there, and, if so wanted, no session is there; at the latest after
        `patience_s`."""
        end = time.monotonic() + patience_s
        while True:
            accounts = await self._accounts()
            if not without_sessions:
                accounts[0].left.pop("sessions", None)
            is_clean = not any(a.broken or any(a.left.values()) for a in accounts)
            if is_clean or time.monotonic() > end:
                return accounts
            await asyncio.sleep(10 * _LOOK_S)

    async def _accounts(self) -> list[Account]:
        core = await self.account(self.core)
        known = core.pop("contexts", {})
        broken = core.pop("broken")
        accounts = [Account(server=self.core.name, left=core, broken=broken)]
        for name, server in self.engines.items():
            own = await self.account(server)
            surplus = own.get("contexts", 0) - known.get(name, 0)
            left = {"jobs": own.get("jobs", 0), "contexts too many": max(0, surplus)}
            left["contexts that only ServeCore believes in"] = max(0, -surplus)
            accounts.append(Account(server=name, left=left, broken=own["broken"]))
        return accounts
