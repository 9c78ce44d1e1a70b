"""Sample files contain no usable secrets. Two files pin each package that is installed:
requirements.lock for ServeCore, with hashes, and constraints.txt for everything."""

import re
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import orjson
import pytest
from packaging.requirements import Requirement

from parrot.engine.config import SimConfig
from parrot.serve.config import CoreConfig
from parrot.utils.config import ConfigError, load_config, parse_config

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements.lock"
CONSTRAINTS = ROOT / "constraints.txt"
PLACES = [*product(("3.11.9", "3.12.9", "3.13.9", "3.14.0"), ("linux", "darwin"))]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in requirements}


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def pins(path: Path) -> list[Requirement]:
    lines = path.read_text().replace("\\\n", " ").splitlines()
    return [Requirement(line.partition(" --hash")[0]) for line in lines]


def pinned(path: Path, python: str, platform: str) -> dict[str, str]:
    """Return the pinned versions by name, for one Python version and platform."""
    place = {
        "python_version": python.rpartition(".")[0],
        "python_full_version": python,
        "sys_platform": platform,
        "platform_machine": "x86_64" if platform == "linux" else "arm64",
    }
    return {
        pin.name: str(pin.specifier)
        for pin in pins(path)
        if pin.marker is None or pin.marker.evaluate(place)
    }


def test_placeholders_are_rejected_by_name() -> None:
    path = ROOT / "sample_configs" / "core" / "multi_tenant.json"
    with pytest.raises(ConfigError, match=r"`api_keys.0`.*set your own secret") as caught:
        load_config(CoreConfig, path)
    assert "`cluster_token`" in str(caught.value)
    payload = orjson.loads(path.read_bytes())
    payload |= {"api_keys": ["a", "b"], "cluster_token": "c"}
    assert parse_config(CoreConfig, payload, "x").host == "0.0.0.0"
    with pytest.raises(ConfigError, match="set your own secret"):
        parse_config(SimConfig, {"engine_type": "sim", "cluster_token": "replace-me-x"}, "x")


def test_the_lock_file_pins_the_requirements_of_servecore_with_digests() -> None:
    needed = names(project()["dependencies"]) | names(project()["optional-dependencies"]["otel"])
    entries = LOCK.read_text().replace("\\\n", " ").splitlines()
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert needed <= {pin.name for pin in pins(LOCK)}


@pytest.mark.parametrize(("python", "platform"), PLACES)
def test_constraints_pin_each_requirement_once(python: str, platform: str) -> None:
    wanted = [
        Requirement(text)
        for extra in ("engine", "dev", "docs", "langchain", "otel", "postgres", "progress")
        for text in [*project()["dependencies"], *project()["optional-dependencies"][extra]]
    ]
    versions = pinned(CONSTRAINTS, python, platform)
    for requirement in wanted:
        marker = requirement.marker
        if requirement.extras or (
            marker is not None and not marker.evaluate({"sys_platform": platform})
        ):
            continue
        (version,) = re.findall(r"==(\S+)", versions[requirement.name])
        assert requirement.specifier.contains(version), f"{requirement} but {version}"


@pytest.mark.parametrize(("python", "platform"), PLACES)
def test_both_files_pin_the_same_versions(python: str, platform: str) -> None:
    lock = pinned(LOCK, python, platform)
    assert lock.items() <= pinned(CONSTRAINTS, python, platform).items()
