from collections.abc import Iterator

import pytest

from parrot import P
from tests.support.fake_serve import FakeServe, running_fake_serve


@pytest.fixture(scope="session")
def running() -> Iterator[tuple[FakeServe, str]]:
    with running_fake_serve() as running:
        yield running


@pytest.fixture
def serve(running: tuple[FakeServe, str]) -> FakeServe:
    running[0].reset()
    return running[0]


@pytest.fixture
def url(serve: FakeServe, running: tuple[FakeServe, str]) -> str:
    return running[1]


@pytest.fixture
def vm(url: str) -> P.VirtualMachine:
    return P.VirtualMachine(url)
