"""A server of another project, and a cluster with one engine for it. All tests share both."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from parrot.cluster import Cluster
from tests.foreign.servers import KINDS, ForeignServer, engine_config

Server = TypeVar("Server", bound=ForeignServer)


def start_server(kind: type[Server], folder: Path, **options: Any) -> Server:
    python = os.environ.get(kind.variable)
    if not python:
        pytest.skip(f"needs a foreign server: {kind.variable} is not set")
    server = kind(python, folder, **options)
    try:
        server.start()
    except BaseException:
        server.end()
        raise
    return server


@pytest.fixture(scope="package", params=KINDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ForeignServer]:
    """Run one server at a time, because each needs memory for a model."""
    started = start_server(KINDS[request.param], tmp_path_factory.mktemp("foreign"))
    yield started
    started.end()


@pytest.fixture(scope="package")
def cluster(server: ForeignServer) -> Iterator[Cluster]:
    """A cluster without reuse of results, so that repeated requests are computed again."""
    core = {"global_scheduler": {"reuse_results": False}}
    with Cluster(core=core, engines=[engine_config(server)]) as running:
        yield running
