"""The component for several ServeCores is valid and consistent, and its pods run as shards."""

import copy
import hashlib
import json
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from parrot.cluster.ports import free_port
from tests.deploy.commands import SIM, running, wait_for
from tests.deploy.test_kubernetes import (
    FOLDER,
    VERSION,
    Document,
    documents,
    kustomized,
    labels_match,
    of_kind,
    pod,
    runnable,
)
from tests.support.two_shards import check_shards

COMPONENT = FOLDER / "sharded"
KEY = "key-of-the-test-0123456789"
SERVE_CORE_HOST = "PARROT_ENGINE__SERVE_CORE__HOST"


def patched(document: Document, operations: list[dict[str, Any]]) -> None:
    """Apply a JSON patch of additions and replacements. All its paths must exist."""
    for operation in operations:
        *parents, last = operation["path"].lstrip("/").split("/")
        place: Any = document
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if last == "-":
            place.append(operation["value"])
        else:
            assert (last in place) == (operation["op"] == "replace"), operation
            place[last] = operation["value"]


def aims_at(target: dict[str, str], document: Document) -> bool:
    label, _, value = target.get("labelSelector", "").partition("=")
    labels = document["metadata"].get("labels", {})
    return (
        document["kind"] == target["kind"]
        and document["metadata"]["name"] == target.get("name", document["metadata"]["name"])
        and (not label or labels.get(label) == value)
    )


def sharded() -> list[Document]:
    """Return the manifests with the component, as Kustomize builds them, without image names."""
    return copy.deepcopy(_sharded())


@cache
def _sharded() -> list[Document]:
    found = documents(FOLDER) + documents(COMPONENT)
    for patch in yaml.safe_load((COMPONENT / "kustomization.yaml").read_text())["patches"]:
        aimed = [document for document in found if aims_at(patch["target"], document)]
        assert aimed, patch["target"]
        for document in aimed:
            patched(document, yaml.safe_load(patch["patch"]))
    return found


@pytest.mark.parametrize("document", sharded(), ids=lambda d: f"{d['kind']} {d['metadata']}")
def test_each_document_is_valid(document: Document) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_the_lists_name_each_pod() -> None:
    core = of_kind("StatefulSet", sharded())["parrot-core"]
    service = of_kind("Service", sharded())[core["spec"]["serviceName"]]
    assert service["spec"]["clusterIP"] == "None"
    assert labels_match(service["spec"]["selector"], core)
    names = [
        f"parrot-core-{index}.{service['metadata']['name']}"
        for index in range(core["spec"]["replicas"])
    ]
    lists = of_kind("ConfigMap", sharded())["parrot-shards"]["data"]
    assert [urlsplit(url).hostname for url in json.loads(lists["cores"])] == names


def test_each_shard_has_engines_of_its_own(tmp_path: Path) -> None:
    engines = of_kind("StatefulSet", sharded())["parrot-qwen3-8b"]
    core = of_kind("StatefulSet", sharded())["parrot-core"]
    assert engines["spec"]["replicas"] == core["spec"]["replicas"]
    hosts = [
        runnable("parrot-qwen3-8b", tmp_path, 9001, index, sharded())[1][SERVE_CORE_HOST]
        for index in range(engines["spec"]["replicas"])
    ]
    assert hosts == [f"parrot-core-{index}.parrot-shards" for index in range(len(hosts))]


def test_shards_reach_each_other() -> None:
    (ingress,) = of_kind("NetworkPolicy", sharded())["parrot-core"]["spec"]["ingress"]
    core = of_kind("StatefulSet", sharded())["parrot-core"]
    allowed = [
        peer["podSelector"]["matchLabels"] for peer in ingress["from"] if {*peer} == {"podSelector"}
    ]
    assert any(labels_match(labels, core) for labels in allowed)


def test_kustomize_builds_the_same(tmp_path: Path) -> None:
    overlay = {"namespace": "own", "resources": ["../kubernetes"]}
    built = kustomized(tmp_path, overlay | {"components": ["../kubernetes/sharded"]})
    for kind in ("StatefulSet", "Service", "NetworkPolicy", "ConfigMap"):
        expected = of_kind(kind, sharded())
        found = of_kind(kind, built)
        assert {*found} == {*expected}
        for name, document in found.items():
            assert document["metadata"].pop("namespace") == "own"
            if kind == "StatefulSet":
                for each in (document, expected[name]):
                    del pod(each)["containers"][0]["image"]
            assert document == expected[name]


def test_the_pods_commands_run_as_shards(tmp_path: Path) -> None:
    ports: list[int] = []
    for _ in range(4):
        ports.append(free_port("127.0.0.1", set(ports)))
    manifests = sharded()
    lists = of_kind("ConfigMap", manifests)["parrot-shards"]["data"]
    for index, port in enumerate(ports[:2]):
        name = f"parrot-core-{index}.parrot-shards"
        lists["cores"] = lists["cores"].replace(f"{name}:9000", f"127.0.0.1:{port}")
    entry = {"id": "team", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}
    with ExitStack() as stack:
        for index, port in enumerate(ports[:2]):
            folder = tmp_path / str(index)
            folder.mkdir()
            (folder / "keys.json").write_text(json.dumps({"keys": [entry]}))
            core, core_env = runnable("parrot-core", folder, port, index, manifests)
            stack.enter_context(running(core, core_env, folder / "core.log"))
            wait_for(port, "/health", folder / "core.log")
        for index, port in enumerate(ports[2:]):
            folder = tmp_path / str(index)
            engine, env = runnable("parrot-qwen3-8b", folder, port, index, manifests)
            env |= SIM | {SERVE_CORE_HOST: "127.0.0.1"}
            env["PARROT_ENGINE__SERVE_CORE__PORT"] = str(ports[index])
            stack.enter_context(running(engine, env, folder / "engine.log"))
            wait_for(ports[index], "/ready", folder / "engine.log")
        check_shards((ports[0], ports[1]), KEY)
