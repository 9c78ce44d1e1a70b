"""The number of examples of random tests."""

from hypothesis import settings

NIGHTLY = "nightly"  # The Hypothesis profile of long runs.


def examples(usual: int) -> int:
    """`usual`, or ten times as many with `--hypothesis-profile nightly`."""
    return usual * 10 if settings.get_current_profile_name() == NIGHTLY else usual
