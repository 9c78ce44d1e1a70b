"""What the benchmarks of the simulated service share: texts, settings, calls and result files."""

import json
import platform
import random
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parrot.protocol.public import CallResponse, SemanticCallRequest
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig
from parrot.simulation import PATIENT, SimClient

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmark" / "results"
LETTERS = "abcdefghijklmnopqrstuvwxyz      "


def words(draw: random.Random, size: int) -> str:
    """A letter is a token of a `sim` engine."""
    return "".join(draw.choices(LETTERS, k=size))


def core_config(**scheduler: Any) -> CoreConfig:
    """A ServeCore that waits for ever, with these keys of its global scheduler."""
    settings = GlobalSchedulerConfig.model_validate(scheduler)
    return PATIENT.model_copy(update={"global_scheduler": settings})


async def submit(
    client: SimClient,
    scope: Mapping[str, Any],
    template: str,
    inputs: Sequence[Mapping[str, Any]],
    sampling: Mapping[str, Any],
    **options: Any,
) -> CallResponse:
    """A call with one output, `{{out}}`. `inputs` are its other parameters, as in REST."""
    output = {"name": "out", "is_output": True, "sampling_config": sampling}
    body = {"template": template, "parameters": [*inputs, output]}
    return await client.semantic_call(SemanticCallRequest.model_validate(scope | body | options))


def output_id(response: CallResponse) -> str:
    return next(info.var_id for info in response.param_info if info.is_output)


def places(count: int, between: str = "") -> str:
    """Of inputs that are named by `bound`."""
    return between.join(f"{{{{i{number}}}}}" for number in range(count))


def bound(var_ids: Sequence[str]) -> list[dict[str, str]]:
    """Inputs that take the values of variables."""
    return [{"name": f"i{number}", "var_id": var_id} for number, var_id in enumerate(var_ids)]


def circumstances() -> dict[str, Any]:
    """The head of every result."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def save(path: Path, report: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n")
