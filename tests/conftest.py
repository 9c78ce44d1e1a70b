"""Fixtures and hooks of all tests."""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import pytest_rerunfailures

from parrot.serve.prompts.templates import TemplateSandbox
from tests.support.examples import NIGHTLY
from tests.support.postgres import Server, running_server
from tests.support.warm_servers import WarmServers

# Each run uses the same examples, so that new failures come from code changes. Long runs use
# others. Examples have no deadline, because their time depends on the machine more than on the
# code.
hypothesis.settings.register_profile("parrot", deadline=None, derandomize=True)
hypothesis.settings.register_profile(NIGHTLY, deadline=None)
hypothesis.settings.load_profile("parrot")

_NO_DEVICE = "needs a CUDA device"
# Reasons for skips that are accepted with `--refuse-skips`.
_EXCUSES = (
    _NO_DEVICE,
    "tests/gpu runs these",  # a machine with a device runs them there
    "needs a CPU with",
    "needs a foreign server",
    "needs the right to mount",  # a small disk, which root can mount outside of most containers
    "needs Ray",  # a large package, for tests of one launcher
    "apt-get install",  # a program of the system, which CI installs where it can
)
_unexpected_skips: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--refuse-skips",
        action="store_true",
        help="fail if a test is skipped for lack of something that Parrot's installation includes",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Disable the crash detection of pytest-rerunfailures, which sends slow requests to the main
    process for each test. A test that ends its worker fails at once."""
    if hasattr(config, "workerinput") and hasattr(config, "failures_db"):
        config.failures_db.sock.close()
        config.failures_db = pytest_rerunfailures.StatusDB()


@pytest.fixture(autouse=True, scope="session")
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state folder for servers of tests, so that they do not use that of the user."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True, scope="session")
def warm_servers() -> Iterator[WarmServers]:
    """Fork the servers of `Cluster`s from one process of this run."""
    servers = WarmServers()
    with pytest.MonkeyPatch.context() as patch:
        instead = servers.instead_of_subprocess()
        patch.setattr("parrot.cluster.process.subprocess", instead)
        yield servers
    servers.close()


@pytest.fixture(autouse=True, scope="session")
def frozen_objects() -> Iterator[None]:
    """Keep objects frozen that `pytest_collection` has frozen, when a server in this process starts
    its garbage collector. A collection of all objects of a worker would take 0.4 s."""
    leaving = SimpleNamespace(**vars(gc) | {"unfreeze": lambda: None})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parrot.utils.collector.gc", leaving)
        yield


@pytest.fixture(autouse=True, scope="session")
def compiled_templates() -> Iterator[None]:
    """Compile each chat template once. Thousands of ServeCores in tests have the same templates."""
    once = lru_cache(maxsize=64)(TemplateSandbox().compile)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TemplateSandbox, "compile", lambda _, source: once(source))
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A PostgreSQL server of this run. Skips the test if PostgreSQL is not installed."""
    with running_server() as server:
        yield server


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collections, which would take 40% of the time and find
    nothing. Later collections skip all objects that exist now."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests if there is no CUDA device. Imports torch only if there are such tests."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not gpu_items:
        return
    reason = _why_no_gpu()
    if reason is not None:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup() -> None:
    """Limit the threads of torch, because loading a model sets them to the number of cores. Several
    test processes with that many threads would compete for the cores."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(threads))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_skip(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (
        _unexpected_skips
        and session.config.getoption("--refuse-skips")
        and session.exitstatus == pytest.ExitCode.OK
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--refuse-skips"):
        for skip in _unexpected_skips:
            terminalreporter.write_line(f"must not be skipped: {skip}", red=True)


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        if not any(excuse in str(reason) for excuse in _EXCUSES):
            _unexpected_skips.append(f"{report.nodeid}: {reason}")


def _why_no_gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return f"{_NO_DEVICE}: torch is not installed"
    return None if torch.cuda.is_available() else f"{_NO_DEVICE}: none here"
