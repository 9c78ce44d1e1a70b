"""A service on a Ray cluster: start it for this process, start it detached, or stop it."""

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_placement_group, remove_placement_group

from parrot.cluster import ClusterError
from parrot.launch.configs import CORE_NAME
from parrot.launch.on_ray.pools import RayPlan
from parrot.launch.on_ray.runtime import RayRuntime, existing_groups, existing_servers
from parrot.launch.on_ray.supervisor import Supervisor

SUPERVISOR = "supervisor"
ANSWER_S = 60.0  # Timeout, in seconds, for an answer of the supervisor.
_PLACED_S = 20.0  # Timeout, in seconds, for an answer of an actor that may not be placed yet.
_MARGIN_S = 30.0  # Seconds added to a server's own stop time.
_FOLLOWS_S = 15.0  # Seconds for a launcher process to notice that its servers were stopped.
_PAUSE_S = 0.25  # Seconds between two looks at the list of actors.


def end_service(namespace: str) -> list[str]:
    """Drain and stop all servers of a namespace, with or without a supervisor. Returns their names.

    Raises `ClusterError` if the namespace is empty or an actor remains."""
    found = existing_servers(namespace)
    groups = existing_groups(namespace)
    if not (found or groups):
        raise ClusterError(f"there is no service named {namespace.removeprefix('parrot-')!r}")
    if SUPERVISOR in found:
        _ask_supervisor(namespace)
    _end_servers(existing_servers(namespace), namespace)
    for name in existing_groups(namespace):
        with suppress(ValueError):
            remove_placement_group(get_placement_group(name))
    if left := _still_there(namespace, ANSWER_S):
        raise ClusterError(f"these servers did not stop in {ANSWER_S:g} s: {', '.join(left)}")
    return sorted({*found, *(group.rpartition("/")[2] for group in groups)})


def _ask_supervisor(namespace: str) -> None:
    """Tell the supervisor to stop its servers, then kill the supervisor's actor."""
    try:
        actor = ray.get_actor(SUPERVISOR, namespace)
    except ValueError:  # The supervisor has exited.
        return
    with suppress(RayError):  # The supervisor exited, or died while it stopped its servers.
        patience_s = ray.get(actor.stop_s.remote(), timeout=ANSWER_S)
        ray.get(actor.stop.remote(), timeout=patience_s + ANSWER_S)
    ray.kill(actor, no_restart=True)


def _end_servers(names: Sequence[str], namespace: str) -> None:
    """Stop servers that have no supervisor, engines first."""
    engines = [name for name in names if name != CORE_NAME]
    for group in (engines, [name for name in names if name == CORE_NAME]):
        _ask_to_stop(_actors(group, namespace))
    for actor in _actors(_still_there(namespace, _FOLLOWS_S) if names else (), namespace):
        ray.kill(actor, no_restart=True)


def _ask_to_stop(actors: Sequence[Any]) -> None:
    """Stop the servers of all actors that Ray has placed. Returns when they have stopped, or after
    the longest of their stop times."""
    if not actors:
        return
    asked = {actor.stop_s.remote(): actor for actor in actors}
    answers, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_PLACED_S)
    ending, longest_s = [], 0.0
    for answer in answers:
        with suppress(RayError):
            longest_s = max(longest_s, ray.get(answer, timeout=_PLACED_S))
            ending.append(asked[answer].stop.remote())
    if ending:
        ray.wait(ending, num_returns=len(ending), timeout=longest_s + _MARGIN_S)


def _actors(names: Sequence[str], namespace: str) -> list[Any]:
    found = []
    for name in names:
        with suppress(ValueError):  # The actor has exited.
            found.append(ray.get_actor(name, namespace))
    return found


def _still_there(namespace: str, timeout_s: float) -> list[str]:
    """The actors that still exist after the timeout. Returns at once when none exists."""
    deadline = time.monotonic() + timeout_s
    while (left := existing_servers(namespace)) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    return left


@contextmanager
def connected(address: str, name: str) -> Iterator[str]:
    """Connect to a Ray cluster. The context's value is the Ray namespace of the service `name`.
    Raises `ClusterError`."""
    namespace = f"parrot-{name}"
    try:
        ray.init(address=address, namespace=namespace, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"no Ray cluster at {address!r} (`ray start --head` starts one): {error}"
        ) from None
    try:
        yield namespace
    except RayError as error:
        raise ClusterError(f"Ray failed: {error}") from error
    finally:
        ray.shutdown()


@contextmanager
def serving(
    plan: RayPlan,
    namespace: str,
    ready_timeout_s: float,
    tell: Callable[[str], None],
    hurried: threading.Event,
) -> Iterator[Supervisor]:
    """Start all servers, enter when they are ready, and stop them on exit. Once `hurried` is set,
    the exit does not wait for running calls. Raises `ClusterError`."""
    _refuse_second(namespace)
    runtime = RayRuntime(namespace, is_detached=False)
    supervisor = Supervisor(plan, runtime, tell, threading.Event().wait)
    try:
        supervisor.start()
        supervisor.wait_ready(ready_timeout_s)
        yield supervisor
    finally:
        supervisor.stop(hurried.is_set)


def launch_detached(plan: RayPlan, namespace: str, ready_timeout_s: float) -> str:
    """Start a service that outlives this process. Returns ServeCore's URL when all servers are
    ready. On failure it stops all servers and raises `ClusterError`."""
    _refuse_second(namespace)
    kind = ray.remote(_DetachedSupervisor).options(
        name=SUPERVISOR,
        namespace=namespace,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=3,
        num_cpus=0,
    )
    actor: Any = kind.remote(plan, namespace, ready_timeout_s)
    patience_s = ready_timeout_s + ray.get(actor.stop_s.remote(), timeout=ANSWER_S)
    core_url, problem = ray.get(actor.wait_started.remote(), timeout=patience_s + ANSWER_S)
    if problem:
        ray.kill(actor, no_restart=True)
        raise ClusterError(problem)
    url: str = core_url
    return url


def _refuse_second(namespace: str) -> None:
    if existing_servers(namespace):
        name = namespace.removeprefix("parrot-")
        raise ClusterError(
            f"a service named {name!r} already runs on this cluster: stop it with --stop, or "
            "choose another --name"
        )


class _DetachedSupervisor:
    """Runs the supervisor in an actor. After a restart by Ray it takes over the existing servers.
    When all servers have stopped, the actor exits without a restart."""

    def __init__(self, plan: RayPlan, namespace: str, ready_timeout_s: float) -> None:
        self._ready_timeout_s = ready_timeout_s
        self._is_over = threading.Event()
        runtime = RayRuntime(namespace, is_detached=True)
        self._supervisor = Supervisor(plan, runtime, _say, self._is_over.wait)
        self._begun: Future[str] = Future()
        servers = [name for name in existing_servers(namespace) if name != SUPERVISOR]
        self._thread = threading.Thread(target=self._run, args=(servers,), daemon=True)
        self._thread.start()

    def stop_s(self) -> float:
        """Upper bound for the duration of `stop`, in seconds."""
        return self._supervisor.stop_s

    def wait_started(self) -> tuple[str | None, str]:
        """Wait for the start. Returns ServeCore's URL and an empty string, or, after all servers
        were stopped, the error message as second item."""
        problem = self._begun.result()
        return self._supervisor.core_url, problem

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self, existing: list[str]) -> None:
        problem = ""
        try:
            self._supervisor.start(existing)
            if not existing:
                try:
                    self._supervisor.wait_ready(self._ready_timeout_s)
                except ClusterError as error:
                    problem = str(error)
            if not problem:
                self._begun.set_result("")
                self._supervisor.run()
            self._supervisor.stop()
        except BaseException:  # noqa: BLE001 - Ray starts this actor again
            traceback.print_exc()
            os._exit(1)
        if problem:
            self._begun.set_result(problem)
            self._is_over.wait(ANSWER_S)  # The launcher needs time to read the problem.
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _say(message: str) -> None:
    """Write to the actor's log."""
    os.write(1, f"{message}\n".encode())
