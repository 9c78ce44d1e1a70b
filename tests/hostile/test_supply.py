"""What an operator gets: samples without secrets that everybody knows, and a lock of what is
installed, with the digests of its files."""

import re
import tomllib
from pathlib import Path

import orjson
import pytest

from parrot.engine.config import SimConfig
from parrot.serve.config import CoreConfig
from parrot.utils.config import ConfigError, load_config, parse_config

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements.lock"


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in requirements}


def test_placeholders_are_refused_by_name() -> None:
    path = ROOT / "sample_configs" / "core" / "multi_tenant.json"
    with pytest.raises(ConfigError, match=r"`api_keys.0`.*put a secret of your own") as caught:
        load_config(CoreConfig, path)
    assert "`cluster_token`" in str(caught.value)
    payload = orjson.loads(path.read_bytes())
    payload |= {"api_keys": ["a", "b"], "cluster_token": "c"}
    assert parse_config(CoreConfig, payload, "x").host == "0.0.0.0"
    with pytest.raises(ConfigError, match="put a secret of your own"):
        parse_config(SimConfig, {"engine_type": "sim", "cluster_token": "replace-me-x"}, "x")


def test_the_lock_has_what_servecore_needs_with_digests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = names(project["dependencies"]) | names(project["optional-dependencies"]["otel"])
    pinned = {}
    for entry in LOCK.read_text().replace("\\\n", " ").splitlines():
        if found := re.match(r"([\w.-]+)==([\w.+!]+)", entry):
            pinned[found[1].lower()] = entry
    assert needed <= set(pinned), needed - set(pinned)
    without = [name for name, entry in pinned.items() if "--hash=sha256:" not in entry]
    assert not without
