"""Settings of a server. The order of precedence is command line, environment, file, defaults."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.engine.config import engine_settings, parse_engine_config
from parrot.serve.config import CoreConfig, core_settings
from parrot.utils.config import ConfigError, load_config, parse_config, read_config_object
from parrot.utils.settings import DEFAULT, layer, without_settings


def core(
    environ: dict[str, str], file: object = None, options: object = None
) -> tuple[CoreConfig, dict[str, str]]:
    """Return the config, and the source of each value that is not a default."""
    settings = core_settings(layer(file or {}, "core.json"), options or {}, environ)
    config = parse_config(CoreConfig, settings.payload, settings.blamed)
    return config, {key: settings.origin((key,)) for key in settings.payload}


def test_the_source_with_precedence_wins() -> None:
    environ = {"PARROT_CORE__PORT": "2", "PARROT_CORE__HOST": "127.0.0.2", "HOME": "/"}
    file = {"port": 1, "host": "a", "page": False}
    config, origins = core(environ, file, {"port": 3})
    assert (config.port, config.host, config.page) == (3, "127.0.0.2", False)
    assert origins == {"port": "command line", "host": "PARROT_CORE__HOST", "page": "core.json"}


def test_sections_are_merged_key_by_key() -> None:
    environ = {"PARROT_CORE__GLOBAL_SCHEDULER__POLICY": "fcfs"}
    config, _ = core(environ, {"global_scheduler": {"policy": "fcfs", "max_queue_size": 7}})
    assert config.global_scheduler.policy == "fcfs"
    assert config.global_scheduler.max_queue_size == 7
    whole = {"PARROT_CORE__GLOBAL_SCHEDULER": '{"max_queue_size": 8}', **environ}
    config, _ = core(whole)
    assert (config.global_scheduler.policy, config.global_scheduler.max_queue_size) == ("fcfs", 8)


def test_texts_are_used_unchanged_and_other_values_as_json() -> None:
    config, _ = core(
        {
            "PARROT_CORE__CLUSTER_TOKEN": "12345678",
            "PARROT_CORE__API_KEYS": '["a", "b"]',
            "PARROT_CORE__NO_ENGINE_TIMEOUT": "null",
            "PARROT_CORE__SESSION_LIFE_SPAN": "1e2",
            "PARROT_CORE__PAGE": "false",
        },
        {"no_engine_timeout": 4},
    )
    assert (config.cluster_token, config.api_keys) == ("12345678", ("a", "b"))
    assert config.no_engine_timeout is None
    assert (config.session_life_span, config.page) == (100.0, False)


def test_variables_set_keys_of_a_section_that_may_be_absent() -> None:
    cores = ["http://a:9000", "http://b:9000"]
    config, _ = core(
        {"PARROT_CORE__SHARDS__INDEX": "1", "PARROT_CORE__SHARDS__CORES": json.dumps(cores)}
    )
    assert config.shards is not None
    assert (config.shards.index, config.shards.cores) == (1, tuple(cores))
    config, _ = core({"PARROT_CORE__SHARDS__INDEX": "1"}, {"shards": {"cores": cores}})
    assert config.shards is not None
    assert config.shards.index == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("PARROT_CORE__PORT", "many", "PARROT_CORE__PORT: `port`: Input should be a valid integer"),
        ("PARROT_CORE__PORT", "70000", "PARROT_CORE__PORT: `port`: Input should be less than"),
        ("PARROT_CORE__HOTS", "x", "PARROT_CORE__HOTS: unknown key `hots`. Did you mean "),
        (
            "PARROT_CORE__GLOBAL_SCHEDULER__X",
            "1",
            "unknown key `global_scheduler.x`.",
        ),
        ("PARROT_CORE_PORT", "1", "write PARROT_CORE__PORT"),
        ("PARROT_CORE__", "1", "PARROT_CORE__: unknown key"),
        ("PARROT_CORE__SHARDS__INDICES", "1", "Did you mean `index`?"),
        (
            "PARROT_CORE__PORT__X",
            "1",
            "`port` is not a section; give it as JSON in PARROT_CORE__PORT",
        ),
        ("PARROT_CORE__MODEL_ALIASES__GPT", "m", "give it as JSON in PARROT_CORE__MODEL_ALIASES"),
        ("PARROT_CORE__PAGE", "yes", "PARROT_CORE__PAGE: `page`: Input should be a valid boolean"),
    ],
)
def test_errors_name_the_variable(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        core({name: text})
    assert message in str(raised.value)


def test_an_error_of_the_file_names_the_file() -> None:
    with pytest.raises(ConfigError, match=r"^core.json: `port`"):
        core({"PARROT_CORE__HOST": "a"}, {"port": "x"})


def test_the_type_of_an_engine_determines_its_variables() -> None:
    environ = {"PARROT_ENGINE__ENGINE_TYPE": "sim", "PARROT_ENGINE__INSTANCE__STEP_S": "0.5"}
    settings = engine_settings(layer({}, "engine.json"), {}, environ)
    config = parse_engine_config(settings.payload, settings.blamed)
    assert (config.engine_type, config.instance.step_s) == ("sim", 0.5)  # type: ignore[union-attr]
    assert settings.origin(("instance", "step_s")) == "PARROT_ENGINE__INSTANCE__STEP_S"
    assert settings.origin(("instance", "block_size")) == DEFAULT
    with pytest.raises(ConfigError, match=r"^PARROT_ENGINE__ENGINE_TYPE: `engine_type`: 'smi' is"):
        engine_settings(None, {}, {"PARROT_ENGINE__ENGINE_TYPE": "smi"})


def test_settings_are_removed_from_the_environment_of_started_servers() -> None:
    environ = {"PARROT_CORE__PORT": "1", "PARROT_ENGINE__PORT": "2", "PARROT_KEY": "k", "A": "b"}
    assert without_settings(environ) == {"PARROT_KEY": "k", "A": "b"}


# YAML


def yaml(tmp_path: Path, text: str) -> dict[str, object]:
    path = tmp_path / "core.yaml"
    path.write_text(text)
    return read_config_object(path)


def test_yaml_is_parsed_like_json(tmp_path: Path) -> None:
    text = """
        # a comment
        port: 9100
        prefix_repair: off
        session_life_span: 1e3
        global_scheduler: {policy: fcfs, reuse_results: false}
        api_keys:
          - "1"
          - 12:30
        no_engine_timeout: null
    """
    assert yaml(tmp_path, text) == {
        "port": 9100,
        "prefix_repair": "off",
        "session_life_span": 1000.0,
        "global_scheduler": {"policy": "fcfs", "reuse_results": False},
        "api_keys": ["1", "12:30"],
        "no_engine_timeout": None,
    }
    assert load_config(CoreConfig, tmp_path / "core.yaml").prefix_repair == "off"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: [1", r"core.yaml: not valid YAML: .* \(line 1, column 9\)"),
        ("- a", "must contain a YAML object"),
        ("", "must contain a YAML object"),
        ("1: 2", "not valid YAML: Dict key must be str"),
        ("port: !!python/object/apply:os.getpid []", "could not determine a constructor"),
        ("port: !!binary aGk=", "not JSON serializable"),
        ("a: 1\na: 2", "'a' is given twice"),
        ("a: \x07", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        ("port: x", ""),
    ],
)
def test_unsupported_yaml_is_reported(tmp_path: Path, text: str, message: str) -> None:
    if not message:
        yaml(tmp_path, text)
        with pytest.raises(
            ConfigError, match=r"core.yaml: `port`: Input should be a valid integer"
        ):
            load_config(CoreConfig, tmp_path / "core.yaml")
        return
    with pytest.raises(ConfigError, match=message):
        yaml(tmp_path, text)


texts = st.text(st.characters(codec="ascii"))  # PyYAML does not join escaped surrogates.
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(payload=st.dictionaries(texts, plain, max_size=4))
def test_json_is_yaml(payload: dict[str, object]) -> None:
    from parrot.utils.yaml_file import load_yaml

    assert load_yaml(json.dumps(payload).encode()) == payload


def test_an_error_about_a_secret_does_not_contain_it() -> None:
    with pytest.raises(ConfigError, match="`api_keys`") as raised:
        parse_config(CoreConfig, {"api_keys": "my-key"}, "core.json")
    assert "my-key" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"`api_keys\.0`") as raised:
        parse_config(CoreConfig, {"api_keys": [7123]}, "core.json")
    assert "7123" not in str(raised.value)
