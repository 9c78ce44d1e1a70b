"""The stream of events: the sinks of each event type, and the effect of a sink that fails."""

import logging

import pytest

from parrot.serve.events import CancelRequested, CoreClosed, Events, PrefixBroken


def test_a_sink_gets_only_its_event_types() -> None:
    events, received = Events(), list[object]()
    events.add({PrefixBroken: received.append})
    events.emit(PrefixBroken, "edited")
    events.emit(CoreClosed, hit=1, recomputed=2, evicted=3)
    assert received == [PrefixBroken("edited")]
    assert events.has_sink(CoreClosed, PrefixBroken)
    assert not events.has_sink(CoreClosed, CancelRequested)


def test_an_event_without_a_sink_is_not_created() -> None:
    def never(reason: str) -> PrefixBroken:
        raise AssertionError(reason)

    Events().emit(never, "edited")


def test_a_failing_sink_is_removed_and_does_not_affect_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, received = Events(), list[object]()

    def fail(event: PrefixBroken) -> None:
        raise OSError("the disk is full")

    events.add({PrefixBroken: fail, CoreClosed: received.append})
    events.add({PrefixBroken: received.append})
    with caplog.at_level(logging.ERROR):
        events.emit(PrefixBroken, "one")
        events.emit(PrefixBroken, "two")
    events.emit(CoreClosed, hit=1, recomputed=2, evicted=3)
    assert received == [PrefixBroken("one"), PrefixBroken("two")]
    assert caplog.text.count("fail failed; its sink receives no more events") == 1
    assert not events.has_sink(CoreClosed)


def test_a_sink_that_fails_while_it_fails_is_removed_once() -> None:
    events = Events()

    def fail(event: PrefixBroken) -> None:
        if event.reason == "outer":
            events.emit(PrefixBroken, "inner")
        raise OSError

    events.add({PrefixBroken: fail})
    events.emit(PrefixBroken, "outer")
    assert not events.has_sink(PrefixBroken)
