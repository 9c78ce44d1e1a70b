"""A rank that stops or kills its own process before the activity `HALTS_AT`, by the signal
`HALTS_BY`."""

import os
import signal

from parrot.engine.runner import load
from parrot.engine.runner.ranks import follower

LOADING = "loading"
HALTS_AT = "PARROT_TEST_HALTS_AT"
HALTS_BY = "PARROT_TEST_HALTS_BY"


def halt_before(doing: str | None) -> None:
    if (doing or "").startswith(os.environ[HALTS_AT]):
        os.kill(os.getpid(), signal.Signals[os.environ[HALTS_BY]])


class HaltingMember(follower.FollowerMember):
    def report(self, doing: str | None) -> None:
        super().report(doing)
        halt_before(doing)


def main() -> None:
    load_rank = load.load_rank

    def load_and_halt(*args: object) -> object:
        halt_before(LOADING)
        return load_rank(*args)  # type: ignore[arg-type]

    follower.load_rank = load_and_halt  # type: ignore[assignment]
    follower.FollowerMember = HaltingMember  # type: ignore[misc]
    follower.main()


if __name__ == "__main__":
    main()
