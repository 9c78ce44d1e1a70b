"""The Kubernetes manifests are valid and consistent, and their commands work."""

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from parrot.cluster.ports import free_port
from parrot.engine.config import engine_settings, parse_engine_config
from tests.deploy.commands import DEPLOY, PARROT, ROOT, SIM, running, wait_for
from tests.support.programs import program

FOLDER = DEPLOY / "kubernetes"
VERSION = "1.37"
ENTRYPOINTS = {"parrot-serve-core": "serve", "parrot-engine": "engine"}
POD_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"
SECRETS = {"cluster_token": "secret-of-the-cluster"}
Document = dict[str, Any]


def documents(folder: Path = FOLDER) -> list[Document]:
    return copy.deepcopy(_documents(folder))


@cache
def _documents(folder: Path) -> list[Document]:
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    texts = [(folder / name).read_text() for name in names if (folder / name).is_file()]
    return [document for text in texts for document in yaml.safe_load_all(text)]


def of_kind(kind: str, among: Iterable[Document] | None = None) -> dict[str, Document]:
    among = documents() if among is None else among
    return {d["metadata"]["name"]: d for d in among if d["kind"] == kind}


def pod(stateful_set: Document) -> Document:
    spec: Document = stateful_set["spec"]["template"]["spec"]
    return spec


def container(stateful_set: Document) -> Document:
    (only,) = pod(stateful_set)["containers"]
    return dict(only)


def labels_match(selector: Mapping[str, str], workload: Document) -> bool:
    return selector.items() <= workload["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("document", documents(), ids=lambda d: f"{d['kind']} {d['metadata']}")
def test_each_document_is_valid(document: Document) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_a_bad_document_would_be_found() -> None:
    bad = of_kind("StatefulSet")["parrot-core"]
    bad["spec"]["replicas"] = "two"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(bad, VERSION, strict=True)


def test_the_kustomization_lists_every_file() -> None:
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == {*yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]}


def test_documents_reference_existing_objects() -> None:
    sets, services, maps = of_kind("StatefulSet"), of_kind("Service"), of_kind("ConfigMap")
    assert {*sets} == {*services} == {*maps}
    images = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["images"]
    assert {image["name"] for image in images} == {*ENTRYPOINTS}
    for name, workload in sets.items():
        assert workload["spec"]["serviceName"] == name
        assert labels_match(workload["spec"]["selector"]["matchLabels"], workload)
        assert labels_match(services[name]["spec"]["selector"], workload)
        own = container(workload)
        assert own["image"] in ENTRYPOINTS
        volumes = pod(workload)["volumes"] + [
            {"name": claim["metadata"]["name"]}
            for claim in workload["spec"]["volumeClaimTemplates"]
        ]
        assert {mount["name"] for mount in own["volumeMounts"]} == {v["name"] for v in volumes}
        for volume in volumes:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps
        ports = {port["name"] for port in own["ports"]}
        probes = [own[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "liveness")]
        assert {*probes, services[name]["spec"]["ports"][0]["targetPort"]} <= ports
    for budget in of_kind("PodDisruptionBudget").values():
        selector = budget["spec"]["selector"]["matchLabels"]
        assert any(labels_match(selector, workload) for workload in sets.values())
    for policy in of_kind("NetworkPolicy").values():
        selector = policy["spec"]["podSelector"]["matchLabels"]
        assert any(labels_match(selector, workload) for workload in sets.values())
    (scaled,) = yaml.safe_load_all((FOLDER / "autoscaled" / "engines_by_queue.yaml").read_text())
    assert scaled["spec"]["scaleTargetRef"]["name"] in sets


def test_engines_find_servecore_and_have_time_to_drain() -> None:
    maps, sets = of_kind("ConfigMap"), of_kind("StatefulSet")
    core = yaml.safe_load(maps["parrot-core"]["data"]["core.yaml"])
    for name, config in maps.items():
        if name == "parrot-core":
            continue
        engine = yaml.safe_load(config["data"]["engine.yaml"])
        assert engine["serve_core"]["host"] in of_kind("Service")
        assert engine["serve_core"]["host"] in core["allowed_hosts"]
        assert pod(sets[name])["terminationGracePeriodSeconds"] > engine["drain_timeout"]


def kustomized(folder: Path, overlay: Mapping[str, Any]) -> list[Document]:
    """Return the documents that kubectl builds from an overlay of the project's manifests."""
    kubectl = program("kubernetes-client", "kubectl")
    shutil.copytree(FOLDER, folder / "kubernetes")
    (folder / "own").mkdir()
    (folder / "own" / "kustomization.yaml").write_text(yaml.safe_dump(dict(overlay)))
    done = subprocess.run(
        [kubectl, "kustomize", f"{folder}/own"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def test_kustomize_builds_an_overlay_with_the_components(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    overlay = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    assert overlay["components"] == ["../kubernetes/autoscaled"]
    assert overlay["namespace"] == "parrot"  # otherwise documents of components have no namespace
    components = sorted(path.parent.name for path in FOLDER.glob("*/kustomization.yaml"))
    overlay["components"] = [f"../kubernetes/{name}" for name in components]
    overlay["namespace"] = "elsewhere"
    built = kustomized(tmp_path, overlay)
    kinds = {document["kind"] for document in built}
    assert {"StatefulSet", "NetworkPolicy", "ScaledObject", "InferencePool"} <= kinds
    own = [document for name in components for document in documents(FOLDER / name)]
    assert len(built) == len(documents()) + len(own)
    for document in built:
        if document["kind"] != "Namespace":
            assert document["metadata"]["namespace"] == "elsewhere", document["metadata"]
    images = {c["image"] for d in built if d["kind"] == "StatefulSet" for c in [container(d)]}
    assert not images & {*ENTRYPOINTS}  # all names have a registry


def runnable(
    name: str, folder: Path, port: int, index: int = 0, among: list[Document] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a pod's container, with its files in `folder`."""
    workload = of_kind("StatefulSet", among)[name]
    maps = of_kind("ConfigMap", among)
    own, config = container(workload), maps[name]["data"]
    fields = {"metadata.name": f"{name}-{index}", POD_INDEX: str(index)}
    for file, text in config.items():
        for place in ("/var/lib/parrot", "/etc/parrot/keys"):
            text = text.replace(place, str(folder))
        (folder / file).write_text(text)
    env = {}
    for variable in own["env"]:
        source = variable.get("valueFrom", {})
        if "value" in variable:
            env[variable["name"]] = re.sub(
                r"\$\((\w+)\)", lambda named: env[named[1]], variable["value"]
            )
        elif "fieldRef" in source:
            env[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "configMapKeyRef" in source:
            key = source["configMapKeyRef"]
            env[variable["name"]] = maps[key["name"]]["data"][key["key"]]
        elif (key := source["secretKeyRef"])["key"] in SECRETS:
            env[variable["name"]] = SECRETS[key["key"]]
        else:
            assert key["optional"], variable
    if pod(workload).get("enableServiceLinks", True):
        for service in of_kind("Service", among):
            env[f"{service.upper().replace('-', '_')}_PORT"] = "tcp://10.0.0.1:9000"
    args = [arg.replace("/etc/parrot", str(folder)) for arg in own["args"]]
    return [*PARROT, ENTRYPOINTS[own["image"]], *args, "--port", str(port)], env


def test_the_commands_of_containers_work(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [{"id": "a", "sha256": "0" * 64}]}))
    core_port = free_port("127.0.0.1", set())
    engine_port = free_port("127.0.0.1", {core_port})
    core, core_env = runnable("parrot-core", tmp_path, core_port)
    engine, engine_env = runnable("parrot-qwen3-8b", tmp_path, engine_port)
    settings = engine_settings(tmp_path / "engine.yaml", {}, engine_env)
    config = parse_engine_config(settings.payload, settings.blamed)
    assert config.engine_name == "parrot-qwen3-8b-0"
    engine_env |= SIM | {"PARROT_ENGINE__SERVE_CORE__PORT": str(core_port)}
    sets = of_kind("StatefulSet")
    with running(core, core_env, tmp_path / "core.log"):
        probes = container(sets["parrot-core"])
        for kind in ("startup", "liveness", "readiness"):
            path = probes[f"{kind}Probe"]["httpGet"]["path"]
            wait_for(core_port, path, tmp_path / "core.log")
        with running(engine, engine_env, tmp_path / "engine.log"):
            probes = container(sets["parrot-qwen3-8b"])
            for kind in ("startup", "liveness", "readiness"):
                path = probes[f"{kind}Probe"]["httpGet"]["path"]
                wait_for(engine_port, path, tmp_path / "engine.log")
            wait_for(core_port, "/ready", tmp_path / "core.log")
    assert (tmp_path / "journal.db").exists()
