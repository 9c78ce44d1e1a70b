"""Finds programs of the system that some tests need. A machine may not have them."""

import os
import shutil

import pytest

# Folders of servers. The PATH of a user may not contain them.
_FOLDERS = "/usr/local/sbin:/usr/sbin"


def program(package: str, *names: str) -> str:
    """The path of the first installed program among `names`. Skips the test if none is installed.
    `package` is the Debian package of the program."""
    path = f"{os.environ.get('PATH', '')}:{_FOLDERS}"
    for name in names:
        if (found := shutil.which(name, path=path)) is not None:
            return found
    pytest.skip(f"needs {names[0]}: apt-get install {package}")


def chromium() -> str:
    """The path of a Chromium. Skips the test if none is installed. The headless shell is preferred,
    because it needs half of the CPU time."""
    names = ("chromium-headless-shell", "chromium", "google-chrome")
    return program("chromium-headless-shell", *names)
