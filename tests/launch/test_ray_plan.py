"""The plan of servers on Ray, and the node resources of each server. These tests need no Ray."""

import json
from pathlib import Path
from typing import Any

import pytest

from parrot.launch.configs import read_entries
from parrot.launch.on_ray.pools import RayPlan, ray_plan
from parrot.utils.config import ConfigError
from tests.support.command import failed, parrot

CORE = {"api_keys": ["key"]}
SAMPLE = Path(__file__).parents[2] / "sample_configs/deploy/ray/qwen3_8b.json"


def planned(tmp_path: Path, *engines: dict[str, Any], core: dict[str, Any] = CORE) -> RayPlan:
    path = tmp_path / "launch.json"
    path.write_text(json.dumps({"core": core, "engines": engines}))
    return ray_plan(*read_entries([path], {}, "ray"))


def gpus(tmp_path: Path, **keys: Any) -> float:
    (pool,) = planned(tmp_path, keys).pools
    return pool.needs.num_gpus


def test_needs(tmp_path: Path) -> None:
    place = {"num_cpus": 4, "resources": {"a100": 0.5, "none": 0}}
    plan = planned(
        tmp_path,
        {"engine_type": "builtin", "ray": place},
        core={**CORE, "ray": {"resources": {"head": 1}}},
    )
    assert str(plan.core_needs) == "1 CPU, 1 head"
    assert str(plan.pools[0].needs) == "4 CPU, 1 GPU, 0.5 a100"
    assert "ray" not in plan.core.config
    assert "ray" not in plan.pools[0].engine.config


def test_an_engine_has_as_many_gpus_as_its_model_is_divided_among(tmp_path: Path) -> None:
    assert gpus(tmp_path) == 1
    assert gpus(tmp_path, device="cuda", instance={"tensor_parallel": 4}) == 4
    assert gpus(tmp_path, device="cpu", instance={"tensor_parallel": 4}) == 0
    assert gpus(tmp_path, engine_type="openai", model="gpt") == 0
    assert gpus(tmp_path, ray={"num_gpus": 0.5}) == 0.5
    assert gpus(tmp_path, device="auto", ray={"num_gpus": 0}) == 0


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ({"device": "cuda:1"}, "engines.0: `device` is 'cuda:1', but Ray assigns"),
        ({"device": "cuda", "ray": {"num_gpus": 0}}, "`num_gpus` is 0, but `device` is cuda"),
        (
            {"ray": {"num_gpus": 1}, "instance": {"tensor_parallel": 2}},
            "is 1, but `tensor_parallel` needs 2",
        ),
        ({"ray": {"num_gpus": 1.5}}, "`num_gpus` is 1.5: use at most 1, or a whole number"),
        ({"ray": {"num_gpu": 1}}, "engines.0.ray: unknown key `num_gpu`. Did you mean `num_gpus`"),
        ({"ray": {"scaling": {"min_engines": 0}}}, "`scaling.min_engines`"),
        ({"ray": 1}, "`engines.0.ray` must be an object"),
        ({"engine_name": "engine-1"}, "named 'engine-1'"),
    ],
)
def test_invalid_settings_are_rejected(
    tmp_path: Path, engine: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        planned(tmp_path, engine, {"engine_type": "sim"})


def test_names_of_pools(tmp_path: Path) -> None:
    sim = {"engine_type": "sim"}
    many = {**sim, "engine_name": "big", "ray": {"scaling": {"max_engines": 3}}}
    plan = planned(tmp_path, sim, many)
    assert [pool.names() for pool in plan.pools] == [["engine-0"], ["big-0", "big-1", "big-2"]]
    server = plan.pools[1].server("big-1")
    assert (server.name, server.config["engine_name"]) == ("big-1", "big-1")
    with pytest.raises(ConfigError, match="named 'big-2'"):
        planned(tmp_path, {**sim, "engine_name": "big-2"}, many)


def test_the_sample() -> None:
    environ = {"PARROT_CORE__API_KEYS": '["key"]'}
    plan = ray_plan(*read_entries([SAMPLE], environ, "ray"))
    assert [str(pool.needs) for pool in plan.pools] == ["4 CPU, 1 GPU", "4 CPU, 2 GPU"]
    assert [len(pool.names()) for pool in plan.pools] == [8, 1]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--detach", str(SAMPLE)], "--stop need --ray"),
        (["--stop"], "--stop need --ray"),
        ([], "config files are needed"),
        (["--ray", "--stop", str(SAMPLE)], "config files are needed"),
    ],
)
def test_incompatible_options(args: list[str], problem: str) -> None:
    result = parrot("launch", *args)
    assert result.returncode == 2
    assert problem in result.stderr


def test_without_ray_the_error_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parrot.cli.launch.find_spec", lambda name: None)
    assert "Ray is not installed: pip install -e '/" in failed("launch", "--ray", str(SAMPLE))
