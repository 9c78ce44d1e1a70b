"""The kinds of config files, the port of each server, and all sample configs."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from parrot.engine.config import parse_engine_config
from parrot.launch.configs import read_configs
from parrot.serve.config import CoreConfig
from parrot.utils.config import ConfigError, load_config, read_config_object

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_configs"
SCRIPTS = sorted([*SAMPLES.glob("launch/*.sh"), ROOT / "tests/run_all_tests.sh", ROOT / ".ci/run"])


def write(path: Path, payload: object) -> Path:
    path.write_text(json.dumps(payload))
    return path


@pytest.fixture
def sim(tmp_path: Path) -> Path:
    return write(tmp_path / "sim.json", {"engine_type": "sim"})


@pytest.fixture
def core(tmp_path: Path) -> Path:
    return write(tmp_path / "core.json", {"port": 9500})


def test_core_and_engine_files_in_any_order(core: Path, sim: Path) -> None:
    expected = ({"port": 9500}, [{"engine_type": "sim", "port": 9001}])
    assert read_configs([core, sim], {}) == expected
    assert read_configs([sim, core], {}) == expected


def test_without_a_core_file_it_has_its_defaults(sim: Path) -> None:
    assert read_configs([sim], {})[0] == {"port": 9000}


def test_the_same_engine_file_several_times(sim: Path) -> None:
    _, engines = read_configs([sim, sim, sim], {})
    assert [engine["port"] for engine in engines] == [9001, 9002, 9003]


def test_engines_avoid_the_port_of_the_core(tmp_path: Path, sim: Path) -> None:
    core = write(tmp_path / "c.json", {"port": 9001})
    assert [engine["port"] for engine in read_configs([core, sim, sim], {})[1]] == [9002, 9003]


def test_launch_file_resolves_paths_and_overrides(tmp_path: Path, sim: Path, core: Path) -> None:
    (tmp_path / "sub").mkdir()
    engines = ["../sim.json", {"config": "../sim.json", "port": 9100}, {"engine_type": "sim"}]
    launch = write(tmp_path / "sub/l.json", {"core": "../core.json", "engines": engines})
    core_config, read = read_configs([launch], {})
    assert core_config == {"port": 9500}
    assert [engine["port"] for engine in read] == [9001, 9100, 9002]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"engines": [], "engine": 1}, "unknown key `engine`; allowed: core, engines"),
        ({"engines": {}}, "`engines` must be a list"),
        ({"engines": [3]}, "`engines.0` must be a path or an object"),
        ({"engines": [{"config": 3}]}, "`engines.0.config` must be a path"),
        ({"engines": ["none.json"]}, "none.json: cannot be read"),
        ({"engines": [{"engine_type": "sim", "prt": 1}]}, "engines.0: unknown key `prt`"),
        ({"engines": [{"engine_type": "simm"}]}, "'simm' is not one of builtin, openai"),
        ({"core": {"port": "x"}, "engines": ["sim.json"]}, "core: `port`: .*valid integer"),
        ({"engine_type": "sim", "port": 0}, "`port`"),
        ({"hots": "x"}, "unknown key `hots`"),
        ([], "must contain a JSON object"),
        ({"engines": []}, "no engine among"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, sim: Path, payload: Any, message: str) -> None:
    path = write(tmp_path / "l.json", payload)
    with pytest.raises(ConfigError, match=message):
        read_configs([path], {})


def test_an_engine_with_another_token_than_its_core_is_rejected(tmp_path: Path) -> None:
    core = write(tmp_path / "core.json", {"cluster_token": "a"})
    same, other = (
        write(tmp_path / f"{token}.json", {"engine_type": "sim", "cluster_token": token})
        for token in ("a", "b")
    )
    read_configs([core, same], {})
    for paths in ([core, other], [other]):
        with pytest.raises(ConfigError, match="`cluster_token` of an engine differs"):
            read_configs(paths, {})


def test_one_core_only(sim: Path, core: Path) -> None:
    with pytest.raises(ConfigError, match="more than one ServeCore"):
        read_configs([core, sim, core], {})


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("core/*.json")), ids=lambda p: p.name)
def test_sample_core_configs_load(path: Path, tmp_path: Path) -> None:
    """All samples load when their placeholders are replaced by secrets."""
    own = tmp_path / "core.json"
    own.write_text(path.read_text().replace("replace-me", "own"))
    load_config(CoreConfig, own)


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("engine/*.json")), ids=lambda p: p.name)
def test_sample_engine_configs_load(path: Path) -> None:
    parse_engine_config(read_config_object(path), str(path))


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("launch/*.json")), ids=lambda p: p.name)
def test_sample_launch_files_load(path: Path) -> None:
    core, engines = read_configs([path], {})
    ports = [core["port"], *(engine["port"] for engine in engines)]
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_scripts_parse_and_name_existing_files(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    words = path.read_text().replace('"', " ").split()
    named = [word for word in words if word.startswith("$ROOT/")]
    for word in named:
        assert (ROOT / word.removeprefix("$ROOT/")).exists() or ".venv" in word, word
    if path.name.startswith("launch_") and "demo" not in path.name:
        read_configs([ROOT / word.removeprefix("$ROOT/") for word in named], {})
    if path.name != "bootstrap.sh":
        assert path.stat().st_mode & 0o100, f"{path} is not executable"


def test_every_sample_has_its_script() -> None:
    scripts = "".join(path.read_text() for path in SCRIPTS)
    for path in SAMPLES.glob("launch/*.json"):
        assert path.name in scripts
