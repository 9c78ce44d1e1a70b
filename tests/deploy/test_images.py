"""The Dockerfile passes the linter and names existing files. No image is built here."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

from parrot.engine.config import engine_settings, parse_engine_config
from parrot.serve.config import core_settings
from tests.deploy.commands import DEPLOY, ROOT

DOCKERFILE = DEPLOY / "docker" / "Dockerfile"


def test_the_linter_finds_nothing() -> None:
    linter = Path(sys.executable).with_name("hadolint")  # installed by the extra `dev`
    done = subprocess.run([linter, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_dockerfile_names_existing_files() -> None:
    text = DOCKERFILE.read_text()
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split()), line
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for group in re.findall(r"\.whl\)\[([a-z,]+)\]", text):
        assert {*group.split(",")} <= {*extras}
    assert re.findall(r"pip install (?!--require-hashes|-c constraints\.txt)", text) == []


def test_volumes_belong_to_the_user_of_the_servers() -> None:
    """A new volume gets the owner of the image's folder at its path, or root if there is none."""
    (made,) = re.findall(
        r"install -d -o parrot -g parrot ((?:.*\\\n)*.*)\n", DOCKERFILE.read_text()
    )
    services = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]
    for service in services.values():
        for volume in service["volumes"]:
            place = Path(volume.partition(":")[2])
            assert str(place) in made.split()
            assert place.is_relative_to("/var/lib") or str(place.parent) in made.split()


def test_compose_sets_known_variables() -> None:
    services = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]
    given = {
        name: re.sub(r"\$\{\w+:\?[^}]*\}", "a-secret-of-the-test", text)
        for service in services.values()
        for name, text in service["environment"].items()
    }
    core = core_settings(None, {"host": "0.0.0.0"}, given).payload
    assert core["allowed_hosts"] == ["serve-core"]
    assert core["api_keys"] == ["a-secret-of-the-test"]
    settings = engine_settings(None, {"host": "0.0.0.0"}, given)
    engine = parse_engine_config(settings.payload, settings.blamed)
    assert engine.serve_core.host in core["allowed_hosts"]
    for service in services.values():
        assert Path(service["build"]["dockerfile"]) == DOCKERFILE.relative_to(ROOT)
        assert f"AS {service['build']['target']}\n" in DOCKERFILE.read_text()
        assert (DEPLOY / "docker" / service["build"]["context"]).resolve() == ROOT
    assert float(services["engine"]["stop_grace_period"].rstrip("s")) > engine.drain_timeout
