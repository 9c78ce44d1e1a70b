"""Clusters of real processes with real HTTP. Tests that do not depend on texts use `sim`
engines."""

from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from parrot.cluster import Cluster
from parrot.protocol.http import HttpClient
from parrot.protocol.serve_client import ServeClient
from tests.support.plain_sampling import PLAIN_SAMPLING

# About 50 tokens per second: slow enough that a test can act while a call runs.
SLOW_SIM = {"engine_type": "sim", "model": "sim", "instance": {"step_s": 0.02}}


@pytest.fixture(scope="module")
def sim_cluster() -> Iterator[Cluster]:
    """A cluster that the tests of a module share. Tests must restore its state."""
    with Cluster(engines=[SLOW_SIM]) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def embedded_cluster() -> Iterator[Cluster]:
    """A cluster with the embedded model, which takes seconds to load. All tests of this folder
    share it and must restore its state.

    `dtype` is float32, so that greedy text depends neither on the other sequences of the batch nor
    on the chunks of prefill. Results are not reused, so that each call is really computed."""
    core = {"global_scheduler": {"reuse_results": False}}
    engine = {"model": "embedded", "dtype": "float32", "instance": {"block_size": 16}}
    engine |= PLAIN_SAMPLING
    with Cluster(core=core, engines=[engine]) as cluster:
        yield cluster


@pytest.fixture
async def client(sim_cluster: Cluster) -> AsyncIterator[ServeClient]:
    async with HttpClient(sim_cluster.core_url) as http:
        yield ServeClient(http)


@pytest.fixture
async def openai_client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of the module's `cluster` without retries."""
    async with openai.AsyncOpenAI(
        base_url=f"{cluster.core_url}/v1", api_key="any", max_retries=0
    ) as client:
        yield client
