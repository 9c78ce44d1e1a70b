"""The stream of events: the sinks of each event type, and the effect of a sink that fails."""

import logging

import pytest

from parrot.serve.events import CancelRequested, CoreClosed, Events, PrefixBroken


def test_a_sink_hears_of_what_it_takes_and_of_nothing_else() -> None:
    events, heard = Events(), list[object]()
    events.add({PrefixBroken: heard.append})
    events.emit(PrefixBroken, "edited")
    events.emit(CoreClosed, hit=1, recomputed=2, evicted=3)
    assert heard == [PrefixBroken("edited")]
    assert events.has_sink(CoreClosed, PrefixBroken)
    assert not events.has_sink(CoreClosed, CancelRequested)


def test_an_event_that_nobody_takes_is_not_made() -> None:
    def never(reason: str) -> PrefixBroken:
        raise AssertionError(reason)

    Events().emit(never, "edited")


def test_a_sink_that_fails_is_told_nothing_more_and_disturbs_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, heard = Events(), list[object]()

    def fail(event: PrefixBroken) -> None:
        raise OSError("the disk is full")

    events.add({PrefixBroken: fail, CoreClosed: heard.append})
    events.add({PrefixBroken: heard.append})
    with caplog.at_level(logging.ERROR):
        events.emit(PrefixBroken, "one")
        events.emit(PrefixBroken, "two")
    events.emit(CoreClosed, hit=1, recomputed=2, evicted=3)
    assert heard == [PrefixBroken("one"), PrefixBroken("two")]
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
