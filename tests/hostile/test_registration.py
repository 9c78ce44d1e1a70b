"""Only servers with the cluster's token may register as engines and use engines."""

import stat
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import pytest

from parrot.cluster import Cluster, ClusterError
from parrot.engine.http_server import main as engine_main
from parrot.protocol.engine_api import SpecialIds, TokenizerResponse
from parrot.protocol.errors import AuthenticationFailed, Conflict, InvalidRequest, Unavailable
from parrot.protocol.http import HttpClient
from parrot.protocol.server_config import kept_token
from parrot.serve.config import CoreConfig
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.server.http_server import main as core_main
from parrot.utils.config import ConfigError
from tests.support.fake_engine import fake_engine
from tests.support.manual_clock import ManualClock

SIM = {"engine_type": "sim", "model": "sim"}
ROGUE = {
    "engine_type": "openai",
    "engine_name": "rogue",
    "model": "sim",
    "host": "127.0.0.1",
    "port": 1,
    "max_seq_len": 4096,
    "tokens_capacity": 4096,
}


def config_file(tmp_path: Path, config: dict[str, Any]) -> str:
    path = tmp_path / "config.json"
    path.write_bytes(orjson.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"api_keys": ["k"]}, "`api_keys` need `cluster_token`"),
        ({"api_keys": ["k"], "insecure": True}, "`api_keys` need `cluster_token`"),
        ({"host": "0.0.0.0"}, "`cluster_token` is missing"),
        ({"host": "::"}, "`cluster_token` is missing"),
        (
            {"host": "0.0.0.0", "cluster_token": "t"},
            "`api_keys` are missing.*in ServeCore's config",
        ),
    ],
)
def test_servecore_without_the_token_that_it_needs_does_not_start(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(SystemExit, match=named):
        core_main(["--config_path", config_file(tmp_path, config), "--port", "0"])


@pytest.mark.parametrize("options", [[], ["--without_core"]])
def test_an_engine_that_others_can_reach_does_not_start_without_a_token(
    tmp_path: Path, options: list[str]
) -> None:
    path = config_file(tmp_path, SIM | {"host": "0.0.0.0"})
    with pytest.raises(SystemExit, match="`cluster_token` is missing"):
        engine_main(["--config_path", path, *options])


async def test_with_api_keys_the_cluster_rejects_requests_without_its_token() -> None:
    with Cluster({"api_keys": ["one"]}, [SIM]) as cluster:
        engine_url = cluster.url(cluster.engine_names[0])
        for token in (None, "one", "guessed"):
            async with HttpClient(cluster.core_url, bearer_token=token) as http:
                for path in ("/register_engine", "/engine_heartbeat"):
                    with pytest.raises(AuthenticationFailed):
                        await http.request("POST", path, body={"engine_config": ROGUE})
            async with HttpClient(engine_url, bearer_token=token) as http:
                with pytest.raises(AuthenticationFailed):
                    await http.request("POST", "/free_context", body={"context_ids": [0]})
                with pytest.raises(AuthenticationFailed):
                    await http.request("POST", "/ping", body={})


def test_a_cluster_and_the_servers_of_one_user_share_the_kept_token(state_home: Path) -> None:
    with Cluster(engines=[SIM]) as cluster:
        assert cluster.cluster_token == kept_token(None)
        path = state_home / "parrot" / "cluster_token"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        by_hand = {key: value for key, value in SIM.items() if key != "cluster_token"}
        cluster.wait_ready([cluster.add_engine(by_hand | {"engine_name": "second"})])


def test_insecure_clusters_have_no_token() -> None:
    with Cluster({"insecure": True}, [SIM]) as cluster:
        assert cluster.cluster_token is None


def test_the_first_of_many_makes_the_token(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(kept_token, [str(tmp_path / "state")] * 32))
    assert len(tokens) == 1
    assert len(tokens.pop()) > 30
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["cluster_token"]


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_token_that_others_can_read_is_rejected(tmp_path: Path, mode: int) -> None:
    kept_token(str(tmp_path))
    (tmp_path / "cluster_token").chmod(mode)
    with pytest.raises(ConfigError, match="must belong to you and have mode 600"):
        kept_token(str(tmp_path))
    with pytest.raises(ClusterError, match="must belong to you and have mode 600"):
        Cluster({"state_dir": str(tmp_path)})


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="state_dir"):
        kept_token(str(tmp_path / "file"))
    (tmp_path / "cluster_token").touch(mode=0o600)
    with pytest.raises(ConfigError, match="empty"):
        kept_token(str(tmp_path))


async def test_an_engine_that_answers_is_not_replaced() -> None:
    with Cluster({}, [SIM]) as cluster:
        (engine,) = cluster.engine_names
        token, config = cluster.cluster_token, cluster.configs[engine]
        async with HttpClient(cluster.core_url, bearer_token=token) as http:
            before = await http.request("GET", "/ready")
            place = {key: config[key] for key in ("engine_name", "host", "port")}
            for incarnation in ("", "guessed"):
                rogue = ROGUE | place | {"incarnation": incarnation}
                with pytest.raises(Conflict, match="is already registered here, and answers"):
                    await http.request("POST", "/register_engine", body={"engine_config": rogue})
            after = await http.request("GET", "/ready")
            assert [e["engine_id"] for e in after["engines"]] == [
                e["engine_id"] for e in before["engines"]
            ]
        cluster.kill(engine)  # a restarted engine at the same address joins at once
        cluster.restart(engine)
        cluster.wait_ready([engine], timeout_s=20)


async def test_an_engine_that_does_not_answer_is_replaced() -> None:
    first, second = fake_engine("a"), fake_engine("a")
    engines = iter((first, second))
    fleet = Dispatcher(CoreConfig(), ManualClock(0.0), lambda info: next(engines)).fleet
    first_id = await fleet.register(first.info)
    first.ping_error = Unavailable("gone")
    assert await fleet.register(second.info) != first_id
    assert [view.info.incarnation for view in fleet.views()] == [second.info.incarnation]
    await fleet.close()


UNUSABLE = {
    "nothing": "",
    "nested": "[" * 200_000,
    "no model": "{}",
    "a wrong id": '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
    "a merge of nothing": '{"model": {"type": "BPE", "vocab": {"a": 1}, "merges": ["b c"]}}',
    "a file elsewhere": '{"model": {"type": "BPE", "vocab": "/etc/hosts", "merges": "/etc/hosts"}}',
}


@pytest.mark.parametrize("name", UNUSABLE)
async def test_an_invalid_tokenizer_is_rejected(name: str) -> None:
    engine, text = fake_engine("odd"), UNUSABLE[name]
    digest = sha256(text.encode()).hexdigest()
    engine.info = engine.info.model_copy(update={"tokenizer_id": digest})
    engine.tokenizer_response = TokenizerResponse.model_construct(
        tokenizer_json=text, chat_template=None, special_ids=SpecialIds(), vocab_size=1
    )
    fleet = Dispatcher(CoreConfig(), ManualClock(0.0), lambda info: engine).fleet
    with pytest.raises(InvalidRequest, match="tokenizer"):
        await fleet.register(engine.info)
    assert not fleet.views()
    await fleet.close()


async def test_a_tokenizer_that_does_not_match_its_id_is_rejected() -> None:
    """Otherwise one engine could replace the tokenizer of all engines with the same id."""
    liar = fake_engine("liar")
    liar.info = liar.info.model_copy(update={"tokenizer_id": "0" * 64})
    fleet = Dispatcher(CoreConfig(), ManualClock(0.0), lambda info: liar).fleet
    with pytest.raises(InvalidRequest, match="SHA-256"):
        await fleet.register(liar.info)
    assert not fleet.views()
    await fleet.close()
