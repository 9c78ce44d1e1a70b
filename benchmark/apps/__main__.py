"""`python -m benchmark.apps`."""

from benchmark.apps.cli import main, parser

__all__ = ["parser"]

if __name__ == "__main__":
    main()
