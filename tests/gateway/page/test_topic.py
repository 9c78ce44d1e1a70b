"""Topics: a viewer that follows the changes with any gaps ends up with the current view."""

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from parrot.gateway.page import feed as topics
from parrot.gateway.page.feed import Topic

KEYS = st.sampled_from("abcde")
VIEWS = st.lists(st.dictionaries(KEYS, st.integers(0, 3)), min_size=1, max_size=12)


def read(event: bytes) -> Any:
    return orjson.loads(event.removeprefix(b"event: changes\ndata: "))


class Follower:
    """The rows that a page knows."""

    def __init__(self) -> None:
        self.version: str | None = None
        self.rows: dict[str, Any] = {}

    def follow(self, topic: Topic) -> bool:
        """Apply the next changes. Returns whether there were any."""
        changes = topic.since(self.version)
        if changes is None:
            return False
        payload = read(changes.event)
        if payload["whole"]:
            self.rows = {}
        assert not payload["rows"].keys() & set(payload["gone"])
        for key in payload["gone"]:
            self.rows.pop(key, None)
        self.rows |= payload["rows"]
        self.version = payload["version"]
        return True


def rows_of(view: dict[str, int]) -> dict[str, dict[str, int]]:
    return {key: {"n": number} for key, number in view.items()}


@given(views=VIEWS, data=st.data())
def test_followers_have_the_current_view_regardless_of_gaps(
    views: list[dict[str, int]], data: st.DataObject
) -> None:
    current: dict[str, int] = {}
    topic = Topic(lambda: rows_of(current))
    followers = [Follower() for _ in range(3)]
    for view in views:
        changed = view != current
        current.clear()
        current.update(view)
        assert topic.update() == changed
        for follower in followers:
            if data.draw(st.booleans()):
                follower.follow(topic)
                assert follower.rows == rows_of(current)
                assert not follower.follow(topic)
    for follower in followers:
        follower.follow(topic)
        assert follower.rows == rows_of(current)


def test_a_follower_that_missed_too_much_gets_the_whole_view(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(topics, "_MAX_REMOVED", 2)
    current = dict.fromkeys("abcdef", 1)
    topic = Topic(lambda: rows_of(current))
    topic.update()
    late = Follower()
    late.follow(topic)
    for key in "abcd":
        del current[key]
        topic.update()
    changes = topic.since(late.version)
    assert changes is not None
    assert read(changes.event)["whole"]
    late.follow(topic)
    assert late.rows == rows_of({"e": 1, "f": 1})


def test_foreign_and_future_versions_are_invalid() -> None:
    topic, other = Topic(lambda: {"a": {}}), Topic(lambda: {"b": {}})
    topic.update()
    other.update()
    number = topic.version.rpartition("-")[2]
    future = topic.version.removesuffix(number) + str(int(number) + 1)
    for version in (None, "", "-", "x", other.version, future, topic.version + "x", "9" * 99):
        changes = topic.since(version)
        assert changes is not None
        assert read(changes.event)["whole"], version
    assert topic.since(topic.version) is None
