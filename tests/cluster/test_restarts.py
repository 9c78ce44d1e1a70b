"""The pauses before restarts."""

from parrot.cluster.process import Restarts


def test_pauses_double_up_to_the_longest_and_each_name_has_its_own() -> None:
    restarts = Restarts(1.0, 5.0)
    assert restarts.wait_s(0.0) is None
    assert [restarts.ended("a", now, now) for now in (0.0, 1.0, 2.0, 3.0, 4.0)] == [1, 2, 4, 5, 5]
    assert restarts.ended("b", 4.0, 4.0) == 1.0
    assert restarts.wait_s(4.5) == 0.5
    assert restarts.take_due(4.9) == []
    assert restarts.take_due(5.0) == ["b"]
    assert restarts.take_due(100.0) == ["a"]
    assert restarts.wait_s(100.0) is None


def test_the_pause_is_short_after_a_run_of_a_minute() -> None:
    restarts = Restarts(1.0, 60.0)
    for _ in range(5):
        restarts.ended("a", 0.0, 0.0)
    assert restarts.ended("a", 0.0, 61.0) == 1.0
    assert restarts.ended("a", 61.0, 62.0) == 2.0
