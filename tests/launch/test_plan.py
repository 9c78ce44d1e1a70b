"""The planned servers of a cluster, before their machines are known."""

import pytest

from parrot.engine.config import parse_engine_config
from parrot.launch.configs import ClusterPlan, plan
from parrot.serve.config import CoreConfig
from parrot.utils.config import ConfigError, parse_config

CORE = {"host": "localhost", "api_keys": ["key"]}
SIM = {"engine_type": "sim"}


def two_engines() -> ClusterPlan:
    return plan(CORE, [SIM, {**SIM, "engine_name": "big", "drain_timeout": 5.0}])


def test_the_planned_configs_are_valid() -> None:
    planned = two_engines()
    core = parse_config(CoreConfig, planned.core.placed(9100), "core")
    assert (core.host, core.port, core.api_keys) == ("0.0.0.0", 9100, ("key",))
    assert "serve_core" not in planned.core.placed(9100, core=("10.0.0.1", 9100))
    for server in planned.engines:
        config = server.placed(9001, core=("10.0.0.1", 9100))
        engine = parse_engine_config(config, server.name)
        assert engine.cluster_token == core.cluster_token
        assert (engine.serve_core.host, engine.serve_core.port) == ("10.0.0.1", 9100)
        assert (engine.host, engine.engine_name) == ("0.0.0.0", server.name)


def test_each_cluster_has_a_token_of_its_own() -> None:
    first, second = two_engines(), two_engines()
    token = first.core.token
    assert token
    assert token != second.core.token
    assert plan({**CORE, "cluster_token": "mine"}, [SIM]).engines[0].token == "mine"


def test_a_drain_may_take_its_time() -> None:
    default, given = two_engines().engines
    assert default.stop_s == 120 + 15
    assert given.stop_s == 5 + 15


def test_an_address_of_the_config_is_kept() -> None:
    planned = plan({**CORE, "host": "10.0.0.1"}, [{**SIM, "host": "10.0.0.2"}])
    assert [planned.core.config["host"], planned.engines[0].config["host"]] == [
        *("10.0.0.1", "10.0.0.2")
    ]


def test_invalid_plans_are_rejected() -> None:
    with pytest.raises(ConfigError, match="`api_keys` are missing"):
        plan({}, [SIM])
    with pytest.raises(ConfigError, match="named 'a'"):
        plan(CORE, [{**SIM, "engine_name": "a"}] * 2)
    with pytest.raises(ConfigError, match="named 'core'"):
        plan(CORE, [{**SIM, "engine_name": "core"}])


def test_insecure_clusters_must_be_requested() -> None:
    planned = plan({"insecure": True}, [SIM])
    assert planned.core.token is None
    assert planned.engines[0].config["insecure"] is True
