"""A ServeCore with its journal, or two with one in a database, or two shards, each with engines of
its own; the engines, and the links between all of them and to the programs."""

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
"""The lock of the ServeCores, and the name of the first."""
TENANTS = ("tenant-a", "tenant-b", "tenant-c")
QUEUE = 16  # tasks: so few that tenants are refused when engines are gone
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
"""The engine of the embedded model among three processes, which has to keep KV on the host."""
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
"""In which a standby serves, on a machine that is busy with much else."""
LATE_S = 5.0
"""For which late engines are gone: longer than all timeouts that are about engines."""
OTHER_MODEL = "sim-b"
"""The model of some engines, of sim engines without shards. It says the same as the other."""
START_S = 4.0
"""In which one that was killed serves again. Clients of several ServeCores wait for it."""
_READY_S = 120.0
_LOOK_S = 0.02
_RESTART_S = 1.0


class EngineLinks:
    """The links of an engine: that of its ServeCores to it, and its own to each of them."""

    def __init__(self, to_engine: Link, to_cores: Sequence[Link]) -> None:
        self.to_engine, self.to_cores = to_engine, to_cores


class Service:
    """Use what `running` gives. Servers that are disturbed are held by `held`, so that nobody else
    does so at the same time. With a database there are two ServeCores, of which one serves; if it
    `has_shards`, two that both do."""

    def __init__(self, folder: Path, *, has_shards: bool = False) -> None:
        self.folder = folder
        self.has_shards = has_shards
        self.clock = WallClock(folder / "clock")
        self.database: Database | None = None
        self.cores: list[Server] = []
        self.serving = 0
        """Which of `cores`, when last looked."""
        self.client_links: list[Link] = []  # to each of `cores`
        self.database_links: list[Link] = []  # of each of `cores`
        self.engines: dict[str, Server] = {}
        self.others: set[str] = set()  # the engines of the other model
        self.links: dict[str, EngineLinks] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._ports: set[int] = set()
        self.engine_config: dict[str, Any] = {}
        self.kills: Counter[str] = Counter()  # of ServeCore and of engines, by faults

    @property
    def core(self) -> Server:
        """The one that serves, if others stand by."""
        return self.cores[self.serving]

    @property
    def _serving_cores(self) -> list[Server]:
        return self.cores if self.has_shards else [self.core]

    def pick_core(self, draw: random.Random) -> int:
        """Which of `cores`, of those that serve."""
        return draw.randrange(len(self.cores)) if self.has_shards else self.serving

    @property
    def urls(self) -> list[str]:
        """Where programs ask."""
        return [f"http://127.0.0.1:{link.port}" for link in self.client_links]

    @property
    def takeover_s(self) -> float:
        """Seconds after a fault in which nobody may serve yet, though all is healed."""
        if self.database is not None:
            return TAKEOVER_S
        return START_S if self.has_shards else 0.0

    def lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def new_port(self) -> int:
        return free_port("127.0.0.1", self._ports)

    def engine(self, name: str, port: int, advertised: int) -> Server:
        """An engine's process, not started: it listens at `port`, and its links are there."""
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
        """Yield the calls that engines answered, also in processes that were killed."""
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
        """All of it, ready; killed in the end, but for the database."""
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
        """Whom an engine registers with: the one and its standbys, or its shard, in turn."""
        return [self.cores[number % len(self.cores)]] if self.has_shards else self.cores

    @asynccontextmanager
    async def _managed(self) -> AsyncIterator[None]:
        """Start a ServeCore again that has ended by itself, as a service manager does: one that
        finds no database when it starts does so. Faults hold the lock while one is gone."""

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
        """One, or one and its standby, each with its own link to the database, or two shards."""
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
        """Wait until a ServeCore serves, or all shards do, with all engines. Raises `TimeoutError`
        with the ends of the logs."""
        try:
            async with asyncio.timeout(_READY_S):
                while not (await asyncio.to_thread(self._live)).issuperset(self.engines):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise TimeoutError(f"not ready in {_READY_S:g} s:\n{self.logs()}") from None

    def _live(self) -> set[str]:
        """The engines that the one ServeCore that serves has, or the shards if all do."""
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
        """Yield the first lines of tracebacks in the logs: defects, whatever programs saw."""
        for log in sorted(self.folder.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            for number, line in enumerate(lines):
                if line.startswith("Traceback"):
                    tail = lines[number : number + 40]
                    yield f"{log.name}: {' / '.join(line.strip() for line in tail)}"

    async def kill(self, *servers: Server) -> None:
        """`kill -9`, all at once; returns when they are gone."""
        self.kills.update("core" if server in self.cores else "engine" for server in servers)
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
            left["contexts that only ServeCore believes in"] = max(0, -surplus)
            accounts.append(Account(server=name, left=left, broken=own["broken"]))
        return accounts
