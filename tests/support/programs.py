"""Programs of the system that some tests drive, and that not every machine has."""

import os
import shutil

import pytest

_FOLDERS = "/usr/local/sbin:/usr/sbin"  # servers, which a user's PATH may not have


def program(package: str, *names: str) -> str:
    """The path of the first of these that is here; skips the test if none is. `package`: what it is
    in on Debian."""
    path = f"{os.environ.get('PATH', '')}:{_FOLDERS}"
    for name in names:
        if (found := shutil.which(name, path=path)) is not None:
            return found
    pytest.skip(f"needs {names[0]}: apt-get install {package}")


def chromium() -> str:
    """The path of a Chromium; skips the test if there is none. The shell without windows, which is
    preferred, takes half of the CPU time."""
    names = ("chromium-headless-shell", "chromium", "google-chrome")
    return program("chromium-headless-shell", *names)
