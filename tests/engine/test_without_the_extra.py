"""Servers without a model import nothing of the extra `engine`. Servers without traces import
nothing of the extra `otel`."""

import subprocess
import sys

PROGRAM = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {extra} or name.startswith({traces}):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
from parrot.engine import http_server
from parrot.engine.config import parse_engine_config
from parrot.engine.engine_types import create_service
from parrot.serve import http_server

for kind in ("sim", "openai"):
    config = {{"engine_type": kind, "model": "m", "instance": {instance}}}
    if kind == "sim":
        del config["instance"]
    create_service(parse_engine_config(config, "test"))
"""


def test_servers_without_a_model_start_without_extras() -> None:
    extra = {"torch", "transformers", "numpy", "safetensors", "gguf", "llguidance"}
    program = PROGRAM.format(
        extra=extra,
        traces=("opentelemetry.sdk", "opentelemetry.exporter"),
        instance={"base_url": "http://localhost:1/v1"},
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
