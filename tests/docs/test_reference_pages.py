"""The generated pages are up to date. Other pages reference only existing files and modules."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import parrot.protocol.errors as errors
from parrot.engine.config import BuiltinConfig, SchedulerConfig
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "INSTALL.md"])


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load("generate_config_reference")


@pytest.mark.parametrize("name", ["generate_config_reference", "generate_pfunc_reference"])
def test_reference_pages_are_up_to_date(name: str) -> None:
    for path, text in load(name).pages().items():
        assert path.read_text() == text, f"run: python docs/{name}.py"


def test_every_key_is_in_the_configuration_page(generator: ModuleType) -> None:
    page = generator.configuration_page()
    for key in ("max_queue_size", "cluster_token", "num_kv_cache_blocks", "azure_endpoint"):
        assert f"| `{key}` |" in page
    assert "| `port` | integer ≥ 1, ≤ 65535 | `9001` |" in page
    for model in (CoreConfig, GlobalSchedulerConfig, BuiltinConfig, SchedulerConfig):
        for key in model.model_fields:
            assert f"| `{key}` |" in page, (model, key)


def test_the_configuration_page_starts_with_the_keys_that_operators_set(
    generator: ModuleType,
) -> None:
    sections = re.split(r"^## ", generator.configuration_page(), flags=re.MULTILINE)
    assert sections[1].startswith("What an operator sets")
    keys = set(re.findall(r"^\| `(\w+)` \|", sections[1], flags=re.MULTILINE))
    assert {"api_keys", "model", "serve_core"} <= keys
    assert len(keys) <= 12
    assert "`eager_fill`" in sections[-1]
    assert sections[-1].startswith("Switches for measurement")


def test_filling_is_repeatable_and_keeps_the_rest(generator: ModuleType) -> None:
    page = "a\n<!-- fields: ParameterInfo -->\nold\n<!-- end -->\nb\n"
    once = generator.filled(page)
    assert generator.filled(once) == once
    assert once.startswith("a\n<!-- fields: ParameterInfo -->\n| key |")
    assert once.endswith("<!-- end -->\nb\n")
    assert "old" not in once


def test_every_error_type_is_documented() -> None:
    page = (DOCS / "rest.md").read_text()
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, errors.ParrotError) and cls.type in page:
            row = next(line for line in page.splitlines() if f"`{cls.type}`" in line)
            assert str(cls.status) in row, cls
    documented = set(re.findall(r"`([a-z_]+)`", page))
    internal = {"parrot_error", "internal_error", "stale_core"}  # not sent to programs
    known = {
        cls.type
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, errors.ParrotError)
    }
    assert known - internal <= documented


def test_every_page_has_its_place_on_the_site() -> None:
    places = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} <= set(places), (
        "add it to nav in mkdocs.yml"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_name_files_that_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for path in re.findall(r"`((?:parrot|sample_configs|tests|docs|examples)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
    for module in re.findall(r"`(parrot(?:\.\w+)+)`", text):
        assert module_exists(module), f"{page.name} names {module}"


def module_exists(dotted: str) -> bool:
    """Whether a module exists, or its parent's source contains the name. Imports nothing."""
    path, (parent, _, name) = ROOT / dotted.replace(".", "/"), dotted.rpartition(".")
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    folder = ROOT / parent.replace(".", "/")
    sources = [p for p in (folder.with_suffix(".py"), folder / "__init__.py") if p.exists()]
    return any(re.search(rf"\b{name}\b", source.read_text()) for source in sources)
