"""The component for inference gateways is valid and selects existing pods."""

import copy
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.test_kubernetes import FOLDER, container, labels_match, of_kind

COMPONENT = FOLDER / "inference_pool"
API, VERSION = "inference.networking.k8s.io/v1", "v1.6.0"
"""The schema version of the Gateway API inference extension (August 2026)."""


def closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """Return the schema of an object without additional keys, as a strict server requires."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


PORT = closed({"number": {"type": "integer", "minimum": 1, "maximum": 65535}}, "number")
LABEL = {"type": "string", "maxLength": 63, "pattern": r"^([A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)?$"}
PICKER = closed(
    {
        "group": {"type": "string", "maxLength": 253},
        "kind": {"type": "string", "pattern": "^[A-Za-z]([-A-Za-z0-9]*[A-Za-z0-9])?$"},
        "name": {"type": "string", "minLength": 1, "maxLength": 253},
        "port": PORT,
        "failureMode": {"enum": ["FailOpen", "FailClose"]},
    },
    "name",
)
POOL = closed(
    {
        "apiVersion": {"const": API},
        "kind": {"const": "InferencePool"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": closed(
            {
                "selector": closed(
                    {
                        "matchLabels": {
                            "type": "object",
                            "minProperties": 1,
                            "maxProperties": 64,
                            "additionalProperties": LABEL,
                        }
                    },
                    "matchLabels",
                ),
                "targetPorts": {
                    "type": "array",
                    "items": PORT,
                    "minItems": 1,
                    "maxItems": 8,
                    "uniqueItems": True,
                },
                "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
                "endpointPickerRef": PICKER,
            },
            "selector",
            "targetPorts",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)
"""The schema of the API in this version. `status` is omitted, because only servers write it."""


def pool() -> dict[str, Any]:
    (only,) = yaml.safe_load_all((COMPONENT / "inference_pool.yaml").read_text())
    return dict(only)


def test_the_pool_is_valid() -> None:
    jsonschema.validate(pool(), POOL)
    picker = pool()["spec"]["endpointPickerRef"]
    assert picker.get("kind", "Service") != "Service" or "port" in picker


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("targetPortNumber", 9000),  # the key before v1
        ("targetPorts", [{"number": 0}]),
        ("selector", {"app": "parrot-core"}),
        ("endpointPickerRef", {"name": "picker", "portNumber": 9002}),
    ],
)
def test_a_bad_pool_would_be_found(key: str, value: Any) -> None:
    bad = copy.deepcopy(pool())
    bad["spec"][key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(bad, POOL)


def test_the_pool_selects_only_servecores() -> None:
    spec, sets = pool()["spec"], of_kind("StatefulSet")
    chosen = [n for n, s in sets.items() if labels_match(spec["selector"]["matchLabels"], s)]
    assert chosen == ["parrot-core"]
    ports = {port["containerPort"] for port in container(sets["parrot-core"])["ports"]}
    assert {port["number"] for port in spec["targetPorts"]} <= ports
