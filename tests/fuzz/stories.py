"""Random programs through ServeCore over simulated engines, by seed."""

import logging
import random
import traceback

from parrot.simulation import run_virtual
from tests.e2e.random_programs import tell


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


def try_story(seed: int) -> str | None:
    """Run a random program. Returns a failure or None. A logged defect counts as a failure."""
    rng = random.Random(seed)
    errors, root = _Errors(), logging.getLogger()
    logging.disable(logging.WARNING)
    root.addHandler(errors)
    try:
        run_virtual(tell(rng, rng.choice([20, 80, 150, 300])))
    except Exception:  # noqa: BLE001 - any exception is a finding
        return traceback.format_exc()
    finally:
        root.removeHandler(errors)
        logging.disable(logging.NOTSET)
    return "\n".join(errors.found) or None
