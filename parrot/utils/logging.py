"""One place that configures logging for a server process."""

import logging
from pathlib import Path

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def setup_logging(
    level: int = logging.INFO, log_dir: str | None = None, log_filename: str | None = None
) -> None:
    """Log to stderr, and also to `log_dir/log_filename` when a directory is given."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if log_dir is not None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(Path(log_dir) / (log_filename or "parrot.log")))
    logging.basicConfig(level=level, format=_FORMAT, handlers=handlers, force=True)
