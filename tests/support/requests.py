"""Requests for calls, as programs send them."""

from typing import Any

from parrot.protocol.public import CallResponse, NativeCallRequest, SemanticCallRequest


def given(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value}


def taken(name: str, var_id: str) -> dict[str, Any]:
    return {"name": name, "var_id": var_id}


def made(name: str, var_id: str | None = None, **sampling: Any) -> dict[str, Any]:
    parameter: dict[str, Any] = {"name": name, "is_output": True}
    if var_id is not None:
        parameter["var_id"] = var_id
    if sampling:
        parameter["sampling_config"] = sampling
    return parameter


def semantic(template: str, *parameters: dict[str, Any], **fields: Any) -> SemanticCallRequest:
    return SemanticCallRequest.model_validate(
        {"session_id": 7, "template": template, "parameters": list(parameters)} | fields
    )


def native(name: str, *parameters: dict[str, Any], **fields: Any) -> NativeCallRequest:
    source = fields.pop("func_source", f"def {name}(): pass")
    return NativeCallRequest.model_validate(
        {"session_id": 7, "func_name": name, "func_source": source, "parameters": list(parameters)}
        | fields
    )


def var_ids(response: CallResponse) -> dict[str, str]:
    """The ids of the call's variables, by parameter name."""
    return {info.parameter_name: info.var_id for info in response.param_info}
