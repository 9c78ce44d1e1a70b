import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from parrot.serve.config import CoreConfig
from parrot.utils.config import ConfigError, load_config, parse_config


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_defaults() -> None:
    config = CoreConfig()
    assert (config.host, config.port) == ("localhost", 9000)
    assert (config.max_sessions_num, config.max_engines_num) == (2048, 2048)
    assert (config.session_life_span, config.engine_heartbeat_timeout) == (600, 30)
    assert config.constant_prefix_var_timeout == 600
    assert config.unserved_timeout_s == 30
    scheduler = config.global_scheduler
    assert scheduler.app_fifo
    assert scheduler.graph_group
    assert scheduler.ctx_group
    assert scheduler.ctx_aware
    assert scheduler.max_queue_size == 1024
    with pytest.raises(ValidationError):
        config.port = 1  # type: ignore[misc]


def test_the_heartbeat_timeout_is_also_that_of_unserved_calls_unless_they_have_their_own() -> None:
    assert CoreConfig(engine_heartbeat_timeout=5).unserved_timeout_s == 5
    config = CoreConfig(engine_heartbeat_timeout=5, no_engine_timeout=90)
    assert (config.engine_heartbeat_timeout, config.unserved_timeout_s) == (5, 90)


def test_a_config_of_the_original_loads_unchanged(tmp_path: Path) -> None:
    original = {
        "host": "localhost",
        "port": 9000,
        "max_sessions_num": 2048,
        "max_engines_num": 2048,
        "session_life_span": 9999999,
        "global_scheduler": {
            "app_fifo": False,
            "graph_group": False,
            "ctx_group": False,
            "ctx_aware": False,
            "max_queue_size": 2048,
        },
    }
    config = load_config(CoreConfig, write(tmp_path / "core.json", original))
    assert config.session_life_span == 9999999
    assert not config.global_scheduler.ctx_aware


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ({"prot": 1}, ["unknown key `prot`", "`port`", "parrot config show"]),
        ({"global_scheduler": {"fifo": True}}, ["`global_scheduler.fifo`", "app_fifo"]),
        ({"port": "9000"}, ["`port`", "integer", "'9000'"]),
        ({"port": 99999}, ["`port`", "65535"]),
        ({"global_scheduler": {"policy": "las"}}, ["`global_scheduler.policy`", "benchmark.serve"]),
        ({"global_scheduler": {"placement": "round_robin"}}, ["benchmark.serve.baselines"]),
        ({"global_scheduler": {"app_fifo": 1}}, ["`global_scheduler.app_fifo`", "boolean"]),
        ({"global_scheduler": {"policy": "x"}}, ["policy", "critical_path", "fcfs"]),
        ({"global_scheduler": [1]}, ["`global_scheduler`"]),
        ({"api_keys": [1]}, ["`api_keys.0`", "string"]),
        ({"session_life_span": 0}, ["`session_life_span`", "greater than 0"]),
        ("[1", ["not valid JSON"]),
        ("[1]", ["object"]),
    ],
)
def test_the_error_of_a_bad_config_names_file_key_and_allowed_values(
    tmp_path: Path, content: object, parts: list[str]
) -> None:
    path = write(tmp_path / "bad.json", content)
    with pytest.raises(ConfigError) as caught:
        load_config(CoreConfig, path)
    for part in [str(path), *parts]:
        assert part in str(caught.value)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.json", {"a": 1, "b": 2, "port": None})
    with pytest.raises(ConfigError) as caught:
        load_config(CoreConfig, path)
    assert len(str(caught.value).splitlines()) == 3


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json: cannot be read"):
        load_config(CoreConfig, tmp_path / "nowhere.json")


def test_secrets_are_not_printed() -> None:
    config = CoreConfig(api_keys=("s3cret",), cluster_token="t0ken")
    assert "s3cret" not in repr(config)
    assert "t0ken" not in repr(config)


def test_the_error_of_a_removed_option_names_the_alternative() -> None:
    with pytest.raises(ConfigError, match=r"prefix_repair.*x-parrot-prefix"):
        parse_config(CoreConfig, {"prefix_repair": "on"}, "core.json")
    assert parse_config(CoreConfig, {"prefix_repair": "off"}, "core.json").prefix_repair == "off"
