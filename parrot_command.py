"""The command `parrot`.

This file lies outside the package `parrot`, because another project's package of the same name may
have replaced that one's `__init__.py`. The command must still be able to say so."""

import runpy
import sys
from pathlib import Path

_INSTALLATION = Path(__file__).with_name("parrot") / "utils" / "installation.py"


def main() -> None:
    try:
        from parrot.cli import main as run
    except ImportError:
        # From its file: no module of the package can be imported.
        installation = runpy.run_path(str(_INSTALLATION))
        if (message := installation["conflict"]()) is None:
            raise
        steps = installation["how_to_install"](installation["repair_lines"]())
        sys.exit(f"error: {message}; {steps}")
    run()
