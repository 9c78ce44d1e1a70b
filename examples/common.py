"""Functions of all examples: the option `--core`, and errors in one line instead of a traceback."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from parrot import P


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--core", metavar="URL", help="ServeCore's address; default: PARROT_URL, or port 9000 here"
    )
    return parser


def run(vm: P.VirtualMachine, program: Callable[..., Any], *args: Any) -> None:
    """Run `program(*args)` in a session."""
    try:
        seconds = vm.run(program, args=args)
    except P.errors.ParrotError as error:
        sys.exit(f"{type(error).__name__}: {error.message}")
    except KeyboardInterrupt:
        sys.exit(130)
    print(f"\n[{seconds:.1f} s]")


def show(title: str, variable: P.SemanticVariable) -> None:
    """Print a variable while it is generated."""
    print(f"\n--- {title} ---")
    for piece in variable.stream():
        print(piece, end="", flush=True)
    print()
