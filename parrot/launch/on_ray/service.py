"""A service on a Ray cluster: begun here, or left there and ended later."""

import os
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from parrot.cluster import ClusterError
from parrot.launch.on_ray.ending import ANSWER_S, SUPERVISOR
from parrot.launch.on_ray.pools import RayPlan
from parrot.launch.on_ray.runtime import RayRuntime, existing_servers
from parrot.launch.on_ray.supervisor import Supervisor


@contextmanager
def connected(address: str, name: str) -> Iterator[str]:
    """Enter with the namespace of the service of this name on a Ray cluster. Raises
    `ClusterError`."""
    namespace = f"parrot-{name}"
    try:
        ray.init(address=address, namespace=namespace, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"no Ray cluster at {address!r} (`ray start --head` begins one): {error}"
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
    """Enter when all servers are ready; leaving ends all, once `hurried` is set without waiting for
    their calls. Raises `ClusterError`."""
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
    """Start a service that stays when this process ends; returns ServeCore's address when all is
    ready. Raises `ClusterError`, after all has been ended again."""
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
    core_url, problem = ray.get(actor.begun.remote(), timeout=patience_s + ANSWER_S)
    if problem:
        ray.kill(actor, no_restart=True)
        raise ClusterError(problem)
    url: str = core_url
    return url


def _refuse_second(namespace: str) -> None:
    if existing_servers(namespace):
        name = namespace.removeprefix("parrot-")
        raise ClusterError(
            f"a service named {name!r} is on this cluster: --stop ends it; or choose another --name"
        )


class _DetachedSupervisor:
    """Supervises in an actor. Started again, it takes over the servers that are there; when all has
    ended it is not started again."""

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
        """Seconds that ending takes at most."""
        return self._supervisor.stop_s

    def begun(self) -> tuple[str | None, str]:
        """ServeCore's address when all is ready, or why it is not; then all has been ended."""
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
            self._is_over.wait(ANSWER_S)  # for the launcher, if it is still there, to hear it
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _say(message: str) -> None:
    """Write to the actor's log."""
    os.write(1, f"{message}\n".encode())
