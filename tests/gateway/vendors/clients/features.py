"""Code that all client scripts share. Each runs in an environment that has only its client:

    python CLIENT.py URL MODEL KEY [FEATURE...]

calls every function that is marked as a feature, and prints one JSON object: the versions of the
packages it names, and of each feature `null` or what went wrong."""

import json
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

URL, MODEL, KEY, *ONLY = sys.argv[1:]
CAPITAL = "What is the capital of France?"
THINK = "Think first, then say: what is the capital of France?"
WEATHER = "What is the weather in Paris?"
IN_JSON = "Which city is the capital of France? Please answer in JSON."
HANG, HANG_ON = "Hang.", "Hang on."  # before the first word, and after it
_features: dict[str, Callable[[], Any]] = {}


def feature(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        _features[name] = function
        return function

    return add


def run(*packages: str) -> None:
    results: dict[str, str | None] = {}
    for name, function in _features.items():
        if ONLY and name not in ONLY:
            continue
        try:
            _ready(name)
            function()
            results[name] = None
        except Exception as error:  # noqa: BLE001 - the error is reported
            traceback.print_exc()
            results[name] = f"{type(error).__name__}: {error}"[:300]
    versions = {package: version(package) for package in packages}
    sys.stdout.write(json.dumps({"versions": versions, "features": results}) + "\n")


def raises(kind: type[Exception], act: Callable[[], Any], *words: str) -> Any:
    """Return the error that `act` raises, and check that its text contains all the words."""
    try:
        act()
    except kind as error:
        for word in words:
            if word not in str(error):
                raise AssertionError(f"no {word} in {error}") from error
        return error
    raise AssertionError(f"no {kind.__name__}")


def _ready(name: str = "") -> Any:
    """The state of the engines. `name`: the feature that begins, which a recorder notes."""
    request = urllib.request.Request(f"{URL}/ready", headers={"x-feature": name})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def wait_until_idle(within_s: float = 5.0) -> None:
    """Wait until no engine works: the requests that a client gave up have stopped."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not any(engine["num_running"] for engine in _ready()["engines"]):
            return
        time.sleep(0.02)
    raise AssertionError("an engine still works")
