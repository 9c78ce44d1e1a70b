from collections.abc import Iterator

import pytest

from parrot import P
from tests.support.fake_serve import FakeServe, create_fake_app, running_in_thread


@pytest.fixture(scope="session")
def running() -> Iterator[tuple[FakeServe, str]]:
    serve = FakeServe()
    with running_in_thread(create_fake_app(serve)) as base_url:
        yield serve, base_url


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
