"""Calls that are retried by the front end, on the real embedded model."""

from collections.abc import Iterator
from typing import Annotated

import pytest
from pydantic import AfterValidator, BaseModel

from parrot import P
from parrot.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEEN: list[str] = []


def refuse_the_first(name: str) -> str:
    SEEN.append(name)
    if len(SEEN) == 1:
        raise ValueError("this name is taken")
    return name


class Bird(BaseModel):
    name: Annotated[str, AfterValidator(refuse_the_first)]


SAMPLING = P.SamplingConfig(temperature=0, max_gen_length=40)


@P.semantic_function(conversation_template=P.chat_template, retries=2, feed_back=True)
def name_bird(kind: P.Input) -> Annotated[P.Returns[Bird], SAMPLING]:
    """A short name for a {{kind}}, as JSON. {{bird}}"""


@P.semantic_function(conversation_template=P.chat_template)
def greet(bird: P.Input) -> Annotated[P.Returns[str], P.SamplingConfig(max_gen_length=4)]:
    """Greet {{bird}}. {{greeting}}"""


def test_a_failed_validator_retries_the_call(embedded_cluster: Cluster) -> None:
    SEEN.clear()
    vm = P.VirtualMachine(embedded_cluster.core_url)
    with vm.running_scope():
        bird = name_bird("parrot")
        greeting = greet(bird)  # submitted before the name is known
        assert greeting.get(timeout=60)
        assert bird.get().name == SEEN[-1]
        first, second, last = sorted(vm.session_info().calls, key=lambda c: c.finished_s or 0)
    assert [call.func_name for call in (first, second, last)] == ["name_bird"] * 2 + ["greet"]
    assert second.cached_tokens >= first.computed_tokens + first.cached_tokens


@pytest.fixture(scope="module")
def hurried_cluster() -> Iterator[Cluster]:
    """A cluster on which calls of missing models fail soon."""
    sim = {"engine_type": "sim", "model": "sim"}
    with Cluster(core={"no_engine_timeout": 0.5}, engines=[sim]) as cluster:
        yield cluster


@P.semantic_function()
def write(topic: P.Input) -> Annotated[P.Returns[str], P.SamplingConfig(max_gen_length=4)]:
    """About {{topic}}: {{text}}"""


def test_a_missing_model_has_a_fallback(hurried_cluster: Cluster) -> None:
    elsewhere = write.with_options(models=["no such model"], retries=1, fallback=write)
    vm = P.VirtualMachine(hurried_cluster.core_url)
    with vm.running_scope():
        texts = vm.map(elsewhere, ["Ada", "Bob"])
        longer = vm.map(write, texts)
        assert all(P.gather([*texts, *longer], timeout=60))
        hopeless = write.with_options(models=["no such model"], retries=1)("Eve")
        with pytest.raises(P.errors.NotFound, match="no such model"):
            write(hopeless).get(timeout=60)
