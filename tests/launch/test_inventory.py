"""Inventories: what they may say, and what runs where."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from parrot.launch.by_ssh.inventory import HostEntry, Inventory, read_inventory
from parrot.launch.by_ssh.ssh import ssh_command
from parrot.launch.by_ssh.supervisor import end_holder, folder_of, holder, holding
from parrot.serve.config import CoreConfig
from parrot.utils.config import ConfigError, parse_config
from tests.deploy.commands import DEPLOY, ROOT

CORE = {"address": "10.0.0.1", "core": {"api_keys": ["key"]}}
SECOND = {"address": "10.0.0.2", "core": {"api_keys": ["key"]}}
TWO = {"index": 0, "cores": ["http://a", "http://b"]}
SHARED = {"shard_cores": [{"host": "c"}]}
DATABASE = {"journal": "postgresql://user@host/database"}
SIM = {"config": {"engine_type": "sim"}}
DUMMY = {"model": "some/model", "instance": {"load_format": "dummy"}}


def read(folder: Path, *hosts: Any, **keys: Any) -> Inventory:
    path = folder / "lab.yaml"
    path.write_text(yaml.safe_dump({"hosts": list(hosts), **keys}))
    return read_inventory(path, {})


def test_servers_get_ports_gpus_and_threads_of_their_machine(tmp_path: Path) -> None:
    divided = {**DUMMY, "instance": {"load_format": "dummy", "tensor_parallel": 2}}
    (tmp_path / "divided.yaml").write_text(yaml.safe_dump(divided))
    inventory = read(
        tmp_path,
        {**CORE, "engines": [SIM, {"config": DUMMY, "count": 2, "cores": 3}]},
        {
            "address": "gpu.lab",
            "gpus": [4, 5, 7, 6, 3],
            "engines": [{"config": "divided.yaml", "count": 2}],
        },
        {"address": "cpu.lab", "engines": [{"config": {**DUMMY, "device": "cpu", "port": 9100}}]},
    )
    assert inventory.name == "lab"
    ((url, core),) = inventory.cores.items()
    assert url == "http://10.0.0.1:9000"
    assert [site.name for site in inventory.sites] == ["gpu.lab", "cpu.lab", "10.0.0.1"]
    gpu, cpu, here = [site.servers for site in inventory.sites]
    assert [(p.server.name, p.port, p.gpus) for p in here] == [
        ("core", 9000, None),
        ("engine-0", 9001, None),
        ("engine-1", 9002, (0,)),
        ("engine-2", 9003, (1,)),
    ]
    assert here[2].config["instance"]["num_threads"] == 3
    assert here[2].env == {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "3"}
    assert [(p.port, p.gpus) for p in gpu] == [(9001, (4, 5)), (9002, (7, 6))]
    assert [(p.port, p.gpus, p.env["CUDA_VISIBLE_DEVICES"]) for p in cpu] == [(9100, (), "")]
    for placed in (*gpu, *cpu):
        assert placed.config["serve_core"] == {"host": "10.0.0.1", "port": 9000}
        assert placed.config["cluster_token"] == core["cluster_token"]


def test_several_servecores_are_shards_that_share_engines(tmp_path: Path) -> None:
    core = {"core": {"api_keys": ["key"]}}
    own = {**SIM, "serve_core": "b.lab", "count": 2}
    inventory = read(
        tmp_path,
        {"address": "fd00::1", **core, "engines": [SIM]},
        {"address": "gpu.lab", "engines": [own]},
        {"address": "b.lab", "core": {**core["core"], "port": 9500}},
    )
    sites = {site.name: [placed.server.name for placed in site.servers] for site in inventory.sites}
    assert sites == {
        "fd00::1+engines": ["engine-0"],
        "gpu.lab": ["engine-1", "engine-2"],
        "fd00::1": ["core-0"],
        "b.lab": ["core-1"],
    }
    assert inventory.num_machines == 3
    urls = ["http://[fd00::1]:9000", "http://b.lab:9500"]
    assert list(inventory.cores) == urls
    tokens = {config["cluster_token"] for config in inventory.cores.values()}
    assert len(tokens) == 1
    for index, config in enumerate(inventory.cores.values()):
        assert config["shards"] == {"index": index, "cores": urls}
        parse_config(CoreConfig, config, "core")
    first, second = {"host": "fd00::1", "port": 9000}, {"host": "b.lab", "port": 9500}
    (shared,), (single, _) = (site.servers for site in inventory.sites[:2])
    assert (shared.config["serve_core"], shared.config["shard_cores"]) == (first, [second])
    assert (single.config["serve_core"], single.config["shard_cores"]) == (second, [])
    assert {shared.config["cluster_token"], single.config["cluster_token"]} == tokens


def test_the_pages_shards_have_engines(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    (block,) = [text for text in page.split("```") if text.startswith("yaml\nhosts:")]
    hosts = yaml.safe_load(block.removeprefix("yaml\n"))["hosts"]
    (tmp_path / "page.yaml").write_text(yaml.safe_dump({"hosts": hosts}))
    inventory = read_inventory(tmp_path / "page.yaml", {"PARROT_CORE__API_KEYS": '["key"]'})
    assert list(inventory.cores) == ["http://10.0.0.1:9000", "http://10.0.0.2:9000"]
    engines = [placed for site in inventory.sites[:3] for placed in site.servers]
    served = {1 + len(placed.config["shard_cores"]) for placed in engines[:8]}
    assert (served, engines[8].config["shard_cores"]) == ({2}, [])


def test_shards_may_do_without_a_token_if_all_do(tmp_path: Path) -> None:
    hosts = [{"address": name, "core": {"insecure": True}} for name in ("a", "b")]
    inventory = read(tmp_path, *hosts, {"address": "c", "engines": [SIM]})
    for config in inventory.cores.values():
        assert config["insecure"]
        assert parse_config(CoreConfig, config, "core").cluster_token is None


def test_the_sample_is_right() -> None:
    environ = {"PARROT_CORE__API_KEYS": '["key"]'}
    inventory = read_inventory(DEPLOY / "ssh" / "lab.yaml", environ)
    assert [len(site.servers) for site in inventory.sites] == [4, 3, 1]
    assert [placed.gpus for placed in inventory.sites[1].servers] == [(0, 1), (2, 3), (4,)]
    assert inventory.cores["http://10.0.0.1:9000"]["api_keys"] == ["key"]


def test_servecore_answers_to_its_hosts_name(tmp_path: Path) -> None:
    own = {"api_keys": ["key"], "allowed_hosts": ["service.lab"]}
    inventory = read(tmp_path, {"address": "one.lab", "core": own, "engines": [SIM]})
    assert inventory.cores["http://one.lab:9000"]["allowed_hosts"] == ["service.lab", "one.lab"]


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([{**CORE, "address": "-oProxyCommand=id", "engines": [SIM]}], "the name of a host"),
        ([{**CORE, "address": "a b", "engines": [SIM]}], "the name of a host"),
        ([{**CORE, "user": "-l", "engines": [SIM]}], "the name of an account"),
        ([{**CORE, "user": "a b", "engines": [SIM]}], "the name of an account"),
        ([{**CORE, "identity_file": "-F/x", "engines": [SIM]}], "must be a path"),
        ([{**CORE, "identity_file": "/%h", "engines": [SIM]}], "must be a path"),
        ([{**CORE, "python": "py\nthon", "engines": [SIM]}], "must be a path"),
        ([{**CORE, "python": "~/venv/bin/python", "engines": [SIM]}], "from the home folder"),
        ([{**CORE, "port": 65536, "engines": [SIM]}], "hosts.0.port"),
        ([{**CORE, "engines": [{**SIM, "counts": 2}]}], "did you mean `count`"),
        ([CORE], "no host has `engines`"),
        ([CORE, {"address": "a"}], "a has neither `core` nor `engines`"),
        ([{**CORE, "engines": [{**SIM, "serve_core": "a"}]}], "`serve_core`: a is no host"),
        (
            [CORE, {**SECOND, "core": {"api_keys": ["key"], "shards": TWO}, "engines": [SIM]}],
            "`shards` of a `core`",
        ),
        ([CORE, {**SECOND, "engines": [{"config": {**SHARED, **SIM["config"]}}]}], "for whom they"),
        (
            [
                {**host, "core": {**host["core"], **DATABASE}, "engines": [SIM]}
                for host in (CORE, SECOND)
            ],
            "of its own",
        ),
        (
            [
                CORE,
                SECOND,
                {"address": "c", "engines": [{"config": {**SIM["config"], "tasks_capacity": 1}}]},
            ],
            "one for each ServeCore",
        ),
        ([{"address": "a", "engines": [SIM]}], "no host has `core`"),
        (
            [CORE, {**CORE, "address": "b", "core": {"api_keys": ["other"]}, "engines": [SIM]}],
            "`api_keys` must be the same",
        ),
        ([CORE, {"address": "10.0.0.1", "engines": [SIM]}], "is there twice"),
        ([{**CORE, "engines": [{"config": "no.yaml"}]}], "cannot be read"),
        ([{**CORE, "engines": [{"config": {"dtipe": "m"}}]}], "10.0.0.1: engines: unknown key"),
        ([{**CORE, "engines": [{"config": {**DUMMY, "device": "cuda:1"}}]}], "`gpus` says"),
        ([{**CORE, "engines": [{"config": {**DUMMY, "device": "cpu"}, "gpus": 1}]}], "is cpu"),
        ([{**CORE, "core": {}, "engines": [SIM]}], "`api_keys` are missing"),
        (
            [{**CORE, "gpus": [2], "engines": [{"config": DUMMY, "count": 2}]}],
            "10.0.0.1: the engines need more `gpus`",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(tmp_path: Path, hosts: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, *hosts)
    assert message in str(raised.value)


def test_no_secret_is_needed_to_stop_what_has_some(tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    path.write_text(json.dumps({"hosts": [{"address": "a", "core": {}, "engines": [SIM]}]}))
    with pytest.raises(ConfigError, match="`api_keys` are missing"):
        read_inventory(path, {})
    assert read_inventory(path, {"PARROT_CORE__INSECURE": "true"}).name == "lab"


def test_a_clusters_name_is_no_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`name` must be letters"):
        read(tmp_path, {**CORE, "engines": [SIM]}, name="../x")


@given(st.lists(st.text(st.characters(exclude_characters="\0"), min_size=1), min_size=1))
def test_a_remote_command_is_the_same_words_to_a_shell(words: list[str]) -> None:
    host = HostEntry(address="a.lab", user="me", port=2222, identity_file="/keys/a b")
    command = ssh_command(host, words)
    assert command[-3:-1] == ["--", "a.lab"]
    assert shlex.split(command[-1]) == words
    assert command[command.index("-i") + 1] == "/keys/a b"


def test_one_process_has_a_cluster_on_a_machine(tmp_path: Path) -> None:
    folder = tmp_path / folder_of("lab", "a").name
    assert holder(folder) is None
    assert end_holder(folder, 0.0)
    with holding(folder):
        assert holder(folder) is not None
    assert holder(folder) is None
