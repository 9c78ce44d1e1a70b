"""Profile a block of code from user programs: `with cprofile("name"): ...`.

The profilers are imported on first use, because every process imports this package."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cprofile(name: str = "", num_rows: int = 30) -> Iterator[None]:
    """Print the cumulative profile of the block to stdout when it returns or raises."""
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.enable()
    try:
        yield
    finally:
        profile.disable()
        if name:
            sys.stdout.write(f"profile of {name}\n")
        pstats.Stats(profile, stream=sys.stdout).sort_stats("cumulative").print_stats(num_rows)
