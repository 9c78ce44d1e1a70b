"""The virtual machine: a program's way to a ServeCore.

What needs asyncio or the network is imported when a session is opened: `from parrot import P` stays
fast, also where nothing is ever run."""

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
    """Holds at most one session at a time, which all scopes that are open share, from whatever
    thread: the first to open makes it, the last to close ends it. A new scope later is a new
    session."""

    def __init__(
        self,
        core_http_addr: str | None = None,
        mode: Mode = "release",
        api_key: str | None = None,
        on_demand: bool = False,
        app: str | None = None,
        restart_timeout_s: float | None = None,
    ) -> None:
        """Nothing is sent yet. `core_http_addr`: with commas between, those of a ServeCore and of
        its standbys; None: what `PARROT_URL` says, or http://localhost:9000. `api_key` None: what
        `PARROT_KEY` says, if it is set. `mode="debug"` logs every call. `on_demand`: only a reader
        makes a call run, unless its function says otherwise. `app`: the program's name, on the
        page, in metrics and traces. `restart_timeout_s`: for so long calls and reads wait for a
        ServeCore that does not answer, and goes on with the session when it is there again (one
        with a journal); None: three attempts."""
        if mode not in ("release", "debug"):
            raise ValueError(f'mode must be "release" or "debug", not {mode!r}')
        # The address that OpenAI's clients are given is one of the same server.
        given = core_http_addr or os.environ.get("PARROT_URL") or _DEFAULT_URL
        urls = [url.strip().rstrip("/").removesuffix("/v1") for url in given.split(",")]
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"`{url}` is not a URL: write `http://{url}`")
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
        """Whether a scope is open, and so a session."""
        return self._session is not None

    @property
    def session_id(self) -> int | None:
        """The id of the session, while there is one."""
        return None if self._session is None else self._session.session_id

    def register_session(self) -> None:
        """Open a scope by hand, without making it current; each needs its `unregister_session`."""
        self._enter()

    def unregister_session(self) -> None:
        """Close a scope. The last one ends the session: what still runs in it is cancelled. Does
        nothing when none is open."""
        with self._lock:
            self._num_scopes = max(self._num_scopes - 1, 0)
            ended = self._session if self._num_scopes == 0 else None
            if ended is not None:
                self._session = None
        if ended is not None:
            ended.close()

    def set_global_env(self) -> None:
        """Open a scope and make its session that of the process, in all its threads, until
        `unset_global_env`. Where another scope is open, that one counts."""
        current_session.of_process = self._enter()

    def unset_global_env(self) -> None:
        """Close the scope that `set_global_env` opened."""
        current_session.of_process = None
        self.unregister_session()

    @contextmanager
    def running_scope(self, timeit: bool = False, report: bool = False) -> Iterator[None]:
        """Calls inside go to this machine's session. Exceptions pass through; the session ends
        either way. `stat_run_time` is the time inside, in seconds; `timeit` also logs it. `report`:
        say at the end, on stderr, what each function cost."""
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
        """Run a program, a function or a coroutine function, in a scope; returns its seconds.
        Raises `RuntimeError` for a coroutine function where an event loop runs already."""
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
                program.close()  # which does nothing, unless there was no session to run it in
        return self.stat_run_time

    def profile(
        self,
        program: Callable[..., Any],
        warmups: int = 3,
        trials: int = 20,
        args: Sequence[Any] = (),
    ) -> float:
        """The mean seconds of `trials` runs, each in a session of its own, after `warmups`."""
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
        """A semantic function made of values; the body is taken as it is, without a formatter.
        Raises `TypeError` for `params` that are not a list of `P.Parameter`."""
        if not isinstance(params, Sequence) or not all(isinstance(p, Parameter) for p in params):
            raise TypeError(
                "`params` of define_function is a list of P.Parameter, such as "
                f'[P.Parameter("text", P.ParamType.INPUT_LOC)], not {params!r:.80}'
            )
        name = func_name or f"anonymous_{self._anonymous_ids.next()}"
        return SemanticFunction(name, params, func_body, try_register, **metadata)

    def import_function(self, function_name: str, module_path: str) -> BasicFunction:
        """The function `function_name` of the module `a.b.c`.

        Raises `ImportError` if there is none, `ValueError` if it is no function of Parrot."""
        module = importlib.import_module(module_path)
        func = getattr(module, function_name, None)
        if func is None:
            raise ImportError(f"cannot import `{function_name}` from `{module_path}`")
        if not isinstance(func, BasicFunction):
            raise ValueError(
                f"`{function_name}` of `{module_path}` is no semantic or native function"
            )
        return func

    def batch(self) -> "Batch":
        """`with vm.batch():` or `async with`: what is called in the block is sent at its end, in
        one request."""
        from parrot.frontend.pfunc.batch import Batch

        return Batch(self._live_session())

    def map(
        self, func: BasicFunction[..., Result], items: Iterable[Any], /, **constants: Any
    ) -> list[Result]:
        """Call the function once with each of the items, in one request: what the calls return, in
        order. An item is the first input that is not among the `constants`."""
        name = _mapped_input(func, constants)
        with self.batch():
            return [func.invoke(**{name: item}, **constants) for item in items]

    async def amap(
        self, func: BasicFunction[..., Result], items: Iterable[Any], /, **constants: Any
    ) -> list[Result]:
        """The same as `map` for async code."""
        name = _mapped_input(func, constants)
        async with self.batch():
            return [await func.ainvoke(**{name: item}, **constants) for item in items]

    def session_info(self) -> "SessionInfo":
        """The session's variables, calls (with engine, tokens and times) and graph so far, which
        notebooks show as a table."""
        from parrot.frontend.pfunc.display.shown import ShownSession

        session = self._live_session()
        return ShownSession(**dict(session.loop.run(session.info())))

    def _report(self) -> None:
        from parrot.frontend.pfunc.display.shown import cost_report

        with suppress(ParrotError):  # a program that failed says why by itself
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
        raise TypeError(f"{func.name}() has no input that is not given to all its calls")
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
