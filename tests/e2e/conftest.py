"""Real processes on this machine, over real HTTP. `sim` engines where the text does not matter."""

from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from parrot.cluster import Cluster
from parrot.protocol.http import HttpClient
from parrot.protocol.serve_client import ServeClient
from tests.support.plain_sampling import PLAIN_SAMPLING

# Fast enough for tests, slow enough to act while a completion runs: about 50 tokens a second.
SLOW_SIM = {"engine_type": "sim", "model": "sim", "instance": {"step_s": 0.02}}


@pytest.fixture(scope="module")
def sim_cluster() -> Iterator[Cluster]:
    """Shared by the tests of a module, which must leave it as they found it."""
    with Cluster(engines=[SLOW_SIM]) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def embedded_cluster() -> Iterator[Cluster]:
    """The embedded model, which takes seconds to load; shared by all tests of this folder, which
    must leave it as they found it. `dtype` float32: greedy text must not depend on what else is in
    the batch, nor on how the work is cut up. Without reuse: what is compared must have been
    computed."""
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
    """A client of the module's `cluster`, which never asks twice."""
    async with openai.AsyncOpenAI(
        base_url=f"{cluster.core_url}/v1", api_key="any", max_retries=0
    ) as client:
        yield client
