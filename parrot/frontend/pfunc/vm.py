"""The virtual machine: a program's connection to a ServeCore.

Modules that need asyncio or the network are imported when a session is opened, so that `from parrot
import P` stays fast."""

import importlib
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from parrot.frontend.pfunc.function import BasicFunction, Parameter, SemanticFunction
from parrot.frontend.pfunc.semantic_variable import current_session
from parrot.protocol.errors import InvalidRequest, ParrotError
from parrot.utils.ids import IdCounter

if TYPE_CHECKING:
    from parrot.frontend.pfunc.batch import Batch
    from parrot.frontend.pfunc.session import Session
    from parrot.protocol.public import SessionInfo

logger = logging.getLogger("parrot.frontend.pfunc")

Result = TypeVar("Result")

Mode = Literal["release", "debug"]
_DEFAULT_URL = "http://localhost:9000"


class VirtualMachine:
    """A connection to ServeCore, with at most one session at a time. The first scope that opens
    starts the session, all open scopes in all threads share it, and the last scope that closes
    ends it. A later scope starts a new session."""

    def __init__(
        self,
        core_http_addr: str | None = None,
        mode: Mode = "release",
        api_key: str | None = None,
        on_demand: bool = False,
        app: str | None = None,
        restart_timeout_s: float | None = None,
    ) -> None:
        """Sends nothing yet. `core_http_addr`: the address of ServeCore, or the addresses of
        ServeCore and its standbys with commas between them. None: the environment variable
        `PARROT_URL`, or http://localhost:9000. `api_key` None: the environment variable
        `PARROT_KEY`, if it is set.

        `mode="debug"` logs every call. `on_demand`: a call runs only for a reader, unless its
        function has another setting. `app`: the name of the program on the web page, in metrics
        and in traces. `restart_timeout_s`: seconds for which calls and reads wait while ServeCore
        restarts; needs a journal. None: three attempts. Raises `ValueError` for an address that is
        not a URL with `http://` or `https://`."""
        if mode not in ("release", "debug"):
            raise ValueError(f'mode must be "release" or "debug", not {mode!r}')
        # Accept the base URL of OpenAI clients, which ends with /v1.
        given = core_http_addr or os.environ.get("PARROT_URL") or _DEFAULT_URL
        urls = [url.strip().rstrip("/").removesuffix("/v1") for url in given.split(",")]
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"`{url}` is not a URL: write `http://{url}`")
            try:
                _ = urlsplit(url).port
            except ValueError as error:
                raise ValueError(f"`{url}` is not a URL: {error}") from None
        self.core_http_addr = ",".join(urls)
        self.stat_run_time = 0.0
        self._api_key = api_key or os.environ.get("PARROT_KEY") or None
        self._on_demand = on_demand
        self._app = app
        self._restart_timeout_s = restart_timeout_s
        self._session: Session | None = None
        self._num_scopes = 0
        self._lock = threading.Lock()
        self._anonymous_ids = IdCounter()
        if mode == "debug":
            logger.setLevel(logging.DEBUG)
            if not logger.hasHandlers():
                logger.addHandler(logging.StreamHandler())

    @property
    def session_registered(self) -> bool:
        """Whether a session is open."""
        return self._session is not None

    @property
    def session_id(self) -> int | None:
        """The id of the open session. None: no session is open."""
        return None if self._session is None else self._session.session_id

    def register_session(self) -> None:
        """Open a scope without making it the current one. Close it with `unregister_session`."""
        self._enter()

    def unregister_session(self) -> None:
        """Close a scope. Closing the last scope ends the session and cancels its running calls.
        Has no effect if no scope is open."""
        with self._lock:
            self._num_scopes = max(self._num_scopes - 1, 0)
            ended = self._session if self._num_scopes == 0 else None
            if ended is not None:
                self._session = None
        if ended is not None:
            ended.close()

    def set_global_env(self) -> None:
        """Open a scope for all threads of the process, until `unset_global_env`. A scope that is
        opened with `running_scope` takes precedence."""
        current_session.of_process = self._enter()

    def unset_global_env(self) -> None:
        """Close the scope that `set_global_env` opened."""
        current_session.of_process = None
        self.unregister_session()

    @contextmanager
    def running_scope(self, timeit: bool = False, report: bool = False) -> Iterator[None]:
        """A block whose calls go to the session of this machine. The session ends with the block,
        also after an exception, which passes through. `stat_run_time` is then the duration of the
        block, in seconds. `timeit` logs the duration. `report` prints the cost of each function to
        stderr."""
        token = current_session.of_context.set(self._enter())
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stat_run_time = time.perf_counter() - start
            if report:
                self._report()
            self.unregister_session()
            current_session.of_context.reset(token)
            if timeit:
                logger.info("the program ran for %.3f s", self.stat_run_time)

    def run(
        self,
        program: Callable[..., Any],
        timeit: bool = False,
        args: Sequence[Any] = (),
        report: bool = False,
    ) -> float:
        """Run a function, coroutine function or coroutine in a scope and return the duration in
        seconds. `timeit` and `report` work as in `running_scope`. Raises `RuntimeError` for a
        coroutine if the thread already has a running event loop."""
        import asyncio

        try:
            if inspect.iscoroutine(program) or inspect.iscoroutinefunction(program):
                _check_no_loop()
            with self.running_scope(timeit, report):
                if inspect.iscoroutine(program):
                    asyncio.run(program)
                elif inspect.isawaitable(result := program(*args)):
                    asyncio.run(_awaited(result))
        finally:
            if inspect.iscoroutine(program):
                program.close()  # Only has an effect if no session could be opened.
        return self.stat_run_time

    def profile(
        self,
        program: Callable[..., Any],
        warmups: int = 3,
        trials: int = 20,
        args: Sequence[Any] = (),
    ) -> float:
        """Run the program `warmups + trials` times, each time in a new session. Returns the mean
        duration of the last `trials` runs, in seconds."""
        if trials < 1:
            raise ValueError("trials must be at least 1")
        for _ in range(warmups):
            self.run(program, args=args)
        return sum(self.run(program, args=args) for _ in range(trials)) / trials

    def define_function(
        self,
        func_name: str | None,
        func_body: str,
        params: Sequence[Parameter],
        try_register: bool = True,
        **metadata: Any,
    ) -> SemanticFunction:
        """Make a semantic function from a prompt in a string. No formatter changes the prompt.
        Raises `TypeError` if `params` is not a list of `P.Parameter`."""
        if not isinstance(params, Sequence) or not all(isinstance(p, Parameter) for p in params):
            raise TypeError(
                "`params` of define_function is a list of P.Parameter, such as "
                f'[P.Parameter("text", P.ParamType.INPUT_LOC)], not {params!r:.80}'
            )
        name = func_name or f"anonymous_{self._anonymous_ids.next()}"
        return SemanticFunction(name, params, func_body, try_register, **metadata)

    def import_function(self, function_name: str, module_path: str) -> BasicFunction:
        """Import a module such as `a.b.c` and return its function. Raises `ImportError` if the
        module has no such name, and `ValueError` if the name is not a function of Parrot."""
        module = importlib.import_module(module_path)
        func = getattr(module, function_name, None)
        if func is None:
            raise ImportError(f"cannot import `{function_name}` from `{module_path}`")
        if not isinstance(func, BasicFunction):
            raise ValueError(
                f"`{function_name}` of `{module_path}` is not a semantic or native function"
            )
        return func

    def batch(self) -> "Batch":
        """A block, with `with` or `async with`, whose calls are sent in one request at its end."""
        from parrot.frontend.pfunc.batch import Batch

        return Batch(self._live_session())

    def map(
        self, func: BasicFunction[..., Result], items: Iterable[Any], /, **constants: Any
    ) -> list[Result]:
        """Call the function once for each item, in one request. Returns the results of the calls,
        in order. The item is the argument of the first input that is not in `constants`."""
        name = _mapped_input(func, constants)
        with self.batch():
            return [func.invoke(**{name: item}, **constants) for item in items]

    async def amap(
        self, func: BasicFunction[..., Result], items: Iterable[Any], /, **constants: Any
    ) -> list[Result]:
        """`map` for async code."""
        name = _mapped_input(func, constants)
        async with self.batch():
            return [await func.ainvoke(**{name: item}, **constants) for item in items]

    def session_info(self) -> "SessionInfo":
        """The variables, calls (engine, tokens, times) and graph of the session. Notebooks show
        the result as a table."""
        from parrot.frontend.pfunc.display.shown import ShownSession

        session = self._live_session()
        return ShownSession(**dict(session.loop.run(session.info())))

    def _report(self) -> None:
        from parrot.frontend.pfunc.display.shown import cost_report

        with suppress(ParrotError):  # The program's own error is more useful.
            sys.stderr.write(cost_report(self.session_info(), self.stat_run_time))

    def _live_session(self) -> "Session":
        if self._session is None:
            raise InvalidRequest("no session: use it inside vm.running_scope() or vm.run()")
        return self._session

    def _enter(self) -> "Session":
        from parrot.frontend.pfunc.session import Session

        with self._lock:
            if self._session is None:
                self._session = Session(
                    self.core_http_addr,
                    self._api_key,
                    on_demand=self._on_demand,
                    app=self._app,
                    restart_timeout_s=self._restart_timeout_s,
                )
            self._num_scopes += 1
            return self._session


def _mapped_input(func: BasicFunction, constants: Mapping[str, Any]) -> str:
    name = next((param.name for param in func.inputs if param.name not in constants), None)
    if name is None:
        raise TypeError(f"{func.name}() needs an input that is not among the constants")
    return name


def _check_no_loop() -> None:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "vm.run() cannot wait for async code where an event loop runs already, as in notebooks and "
        "async functions: write `with vm.running_scope(): await program()`"
    )


async def _awaited(result: Any) -> Any:
    return await result
