"""The service under test: one ServeCore with a journal file, two ServeCores with a journal in a
database, or two shards with separate engines. All connections between servers go through links."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from parrot.cluster.ports import ask, free_port
from tests.nemesis.database import Database
from tests.nemesis.history import Account, AnsweredCall
from tests.nemesis.link import Link
from tests.nemesis.servers import ACCOUNT, Server, WallClock, run_core, run_engine
from tests.support.plain_sampling import PLAIN_SAMPLING

CORES = "serve-core"
"""The lock of the ServeCores, and the name of the first ServeCore."""
TENANTS = ("tenant-a", "tenant-b", "tenant-c")
QUEUE = 16  # Maximum queue size. Small, so that calls are rejected while engines are down.
CORE: dict[str, Any] = {
    "api_keys": TENANTS,
    "cluster_token": "of-the-nemesis",
    "engine_heartbeat_timeout": 2.0,
    "no_engine_timeout": 1.5,
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
    "instance": {"step_s": 0.004, "num_kv_cache_blocks": 2048, "samples": True},
}
EMBEDDED: dict[str, Any] = {
    "engine_type": "builtin",
    "model": "embedded",
    "served_model_name": "sim",
    "dtype": "float32",
    **PLAIN_SAMPLING,
    "heartbeat_interval": 0.2,
    "instance": {"block_size": 16, "num_kv_cache_blocks": 1024, "num_threads": 1},
}
DIVIDED = "divided"
"""An engine of the embedded model with three tensor-parallel processes. Its KV cache is so small
that KV moves to CPU memory."""
_DIVIDED_INSTANCE: dict[str, Any] = {
    "block_size": 16,
    "num_kv_cache_blocks": 128,
    "host_kv_gb": 0.25,
    "num_threads": 1,
    "tensor_parallel": 3,
}
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "sim": SIM,
    "embedded": EMBEDDED,
    DIVIDED: EMBEDDED | {"instance": _DIVIDED_INSTANCE},
}
TAKEOVER_S = 8.0
"""Seconds within which a standby takes over, on a busy machine."""
LATE_S = 5.0
"""Seconds for which late engines are down: longer than all timeouts about engines."""
OTHER_MODEL = "sim-b"
"""The model of every second sim engine in a layout without shards. Its outputs are the same."""
START_S = 4.0
"""Seconds within which a killed shard serves again. Clients of shards wait for it."""
_READY_S = 120.0
_LOOK_S = 0.02
_RESTART_S = 1.0


class EngineLinks:
    """The links from ServeCores to an engine, and from the engine to each ServeCore."""

    def __init__(self, to_engine: Link, to_cores: Sequence[Link]) -> None:
        self.to_engine, self.to_cores = to_engine, to_cores


class Service:
    """All servers and links, which exist within `running`. A fault holds the `lock` of its targets,
    so that no other fault affects them. With a database, there are an active and a standby
    ServeCore; with `has_shards`, two active ones."""

    def __init__(self, folder: Path, *, has_shards: bool = False) -> None:
        self.folder = folder
        self.has_shards = has_shards
        self.clock = WallClock(folder / "clock")
        self.database: Database | None = None
        self.cores: list[Server] = []
        self.serving = 0
        """The index of the active ServeCore in `cores`, as of the last check."""
        self.client_links: list[Link] = []  # from clients to each of `cores`
        self.database_links: list[Link] = []  # from each of `cores` to the database
        self.engines: dict[str, Server] = {}
        self.others: set[str] = set()  # the engines of the other model
        self.links: dict[str, EngineLinks] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._ports: set[int] = set()
        self.engine_config: dict[str, Any] = {}
        self.kills: Counter[str] = Counter()  # of ServeCores and of engines

    @property
    def core(self) -> Server:
        """The active ServeCore, if the other is a standby."""
        return self.cores[self.serving]

    @property
    def _serving_cores(self) -> list[Server]:
        return self.cores if self.has_shards else [self.core]

    def pick_core(self, draw: random.Random) -> int:
        """Return the index of an active ServeCore in `cores`."""
        return draw.randrange(len(self.cores)) if self.has_shards else self.serving

    @property
    def urls(self) -> list[str]:
        """The URLs of all ServeCores for programs."""
        return [f"http://127.0.0.1:{link.port}" for link in self.client_links]

    @property
    def takeover_s(self) -> float:
        """Seconds after a repaired fault in which no ServeCore may serve yet."""
        if self.database is not None:
            return TAKEOVER_S
        return START_S if self.has_shards else 0.0

    def lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def new_port(self) -> int:
        return free_port("127.0.0.1", self._ports)

    def engine(self, name: str, port: int, advertised: int) -> Server:
        """Create the server of an engine without starting it. Its links must exist."""
        links = self.links[name].to_cores
        core, *others = ({"host": "127.0.0.1", "port": link.port} for link in links)
        config = {"engine_name": name, "host": "127.0.0.1", "port": port, "serve_core": core}
        if name in self.others:
            config["model"] = OTHER_MODEL
        config |= {"cluster_token": CORE["cluster_token"], "standby_cores": others}
        facts = (str(self.clock.path), str(self._call_log(name)), advertised)
        return Server(name, run_engine, self.engine_config | config, self.folder, *facts)

    def _call_log(self, name: str) -> Path:
        return self.folder / f"{name}.calls"

    def answered_calls(self) -> Iterator[AnsweredCall]:
        """Yield the calls that engines answered, including engines that were killed."""
        for name in self.engines:
            log = self._call_log(name)
            for line in log.read_text().splitlines() if log.exists() else ():
                yield AnsweredCall(engine=name, **json.loads(line))

    @asynccontextmanager
    async def running(
        self,
        num_engines: int,
        engine: Mapping[str, Any],
        database: Database | None = None,
        **core: Any,
    ) -> AsyncIterator[None]:
        """Start all servers, and wait until they are ready. At the end, kill all but the
        database."""
        self.engine_config, self.database = dict(engine), database
        if engine["engine_type"] == "sim" and not self.has_shards:
            self.others = {f"engine-{number}" for number in range(1, num_engines, 2)}
        async with AsyncExitStack() as stack:
            await self._make_cores(stack, core)
            for number in range(num_engines):
                name, own = f"engine-{number}", self.new_port()
                to_engine = await stack.enter_async_context(Link(own))
                to_cores = [
                    await stack.enter_async_context(Link(server.config["port"]))
                    for server in self._cores_of(number)
                ]
                self.links[name] = EngineLinks(to_engine, to_cores)
                self.engines[name] = self.engine(name, own, to_engine.port)
            try:
                for server in (*self.cores, *self.engines.values()):
                    server.start()
                await self.ready()
                async with self._managed():
                    yield
            finally:
                for server in (*self.cores, *self.engines.values()):
                    await server.kill()

    def _cores_of(self, number: int) -> list[Server]:
        """Return the ServeCores of an engine: the active one and its standby, or one shard."""
        return [self.cores[number % len(self.cores)]] if self.has_shards else self.cores

    @asynccontextmanager
    async def _managed(self) -> AsyncIterator[None]:
        """Restart ServeCores that have ended by themselves, like a service manager. A ServeCore
        ends if it cannot reach its database at startup. Faults that stop a ServeCore hold its lock,
        so it is not restarted meanwhile."""

        async def manage() -> None:
            while True:
                await asyncio.sleep(_RESTART_S)
                async with self.lock(CORES):
                    for server in self.cores:
                        if not server.is_alive:
                            server.start()

        manager = asyncio.create_task(manage())
        try:
            yield
        finally:
            manager.cancel()
            await asyncio.gather(manager, return_exceptions=True)

    async def _make_cores(self, stack: AsyncExitStack, config: Mapping[str, Any]) -> None:
        """Create one ServeCore, or one with a standby, or two shards, with their links."""
        names, address = [CORES], str(self.folder / "journal")
        if self.database is not None:
            names.append("serve-core-standby")
            address = await asyncio.to_thread(self.database.database)
        elif self.has_shards:
            names.append("serve-core-shard")
        for name in names:
            port, journal = self.new_port(), address
            if self.has_shards:
                journal = str(self.folder / f"journal-of-{name}")
            if self.database is not None:
                link = await stack.enter_async_context(Link(self.database.port))
                journal = address.replace(f":{self.database.port}/", f":{link.port}/")
                self.database_links.append(link)
            own = {"journal": journal, "state_dir": str(self.folder), "port": port}
            whole = {**CORE, **own, "host": "127.0.0.1", **config}
            self.cores.append(Server(name, run_core, whole, self.folder, str(self.clock.path)))
            self.client_links.append(await stack.enter_async_context(Link(port)))
        if self.has_shards:
            for index, core in enumerate(self.cores):
                core.config["shards"] = {"index": index, "cores": self.urls}

    async def ready(self) -> None:
        """Wait until a ServeCore (or all shards) serves with all engines. Raises `TimeoutError`
        with the last lines of the logs."""
        try:
            async with asyncio.timeout(_READY_S):
                while not (await asyncio.to_thread(self._live)).issuperset(self.engines):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise TimeoutError(f"not ready in {_READY_S:g} s:\n{self.logs()}") from None

    def _live(self) -> set[str]:
        """Return the engines of the active ServeCore, or of the shards if all of them serve."""
        found = []
        for number, core in enumerate(self.cores):
            token, port = CORE["cluster_token"], core.config["port"]
            answer = ask("127.0.0.1", port, "/ready", token=token, timeout_s=1.0)
            if answer is not None and answer[0] == 200:
                self.serving = number
                found.append({engine["engine_name"] for engine in answer[1]["engines"]})
        if self.has_shards:
            return set.union(*found) if len(found) == len(self.cores) else set()
        return set.intersection(*found) if found else set()

    def logs(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        tails = ((log.name, log.read_text(errors="replace").splitlines()[-15:]) for log in logs)
        return "\n".join("\n".join([f"--- {name}", *lines]) for name, lines in tails)

    def errors(self) -> Iterator[str]:
        """Yield the tracebacks in the logs. Each is a defect, even if no program was affected."""
        for log in sorted(self.folder.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            for number, line in enumerate(lines):
                if line.startswith("Traceback"):
                    tail = lines[number : number + 40]
                    yield f"{log.name}: {' / '.join(line.strip() for line in tail)}"

    async def kill(self, *servers: Server) -> None:
        """Kill servers at the same time, and wait until they have ended."""
        self.kills.update("core" if server in self.cores else "engine" for server in servers)
        await asyncio.gather(*(server.kill() for server in servers))

    # Accounts

    async def account(self, server: Server) -> dict[str, Any]:
        """Return the internal state that the server reports. Without an answer, it is `broken`."""
        answer = await asyncio.to_thread(
            ask, "127.0.0.1", server.config["port"], ACCOUNT, 10.0, CORE["cluster_token"]
        )
        if answer is None or answer[0] != 200:
            return {"broken": f"no account: {answer}"}
        account: dict[str, Any] = answer[1]
        return account

    async def settled(self, patience_s: float, *, without_sessions: bool) -> list[Account]:
        """Return the accounts of all servers when nothing runs and each engine has exactly the
        contexts that ServeCore knows. `without_sessions` also waits until there are no sessions.
        Returns the last accounts after `patience_s` seconds."""
        end = time.monotonic() + patience_s
        while True:
            accounts = await self._accounts()
            for account in () if without_sessions else accounts:
                account.left.pop("sessions", None)
            is_clean = not any(a.broken or any(a.left.values()) for a in accounts)
            if is_clean or time.monotonic() > end:
                return accounts
            await asyncio.sleep(10 * _LOOK_S)

    async def _accounts(self) -> list[Account]:
        accounts, known = list[Account](), Counter[str]()
        for core in self._serving_cores:
            told = await self.account(core)
            known.update(told.pop("contexts", {}))
            broken = told.pop("broken")
            accounts.append(Account(server=core.name, left=told, broken=broken))
        for name, server in self.engines.items():
            own = await self.account(server)
            surplus = own.get("contexts", 0) - known[name]
            left = {"jobs": own.get("jobs", 0), "contexts too many": max(0, surplus)}
            left["contexts that only ServeCore knows"] = max(0, -surplus)
            accounts.append(Account(server=name, left=left, broken=own["broken"]))
        return accounts
