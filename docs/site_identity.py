"""A hook of mkdocs: the version on each page, edit links, and llms.txt.

The environment variables PARROT_SITE_URL, PARROT_REPO_URL and PARROT_CONTACT name the addresses of
the site, the repository and the maintainers. Without PARROT_SITE_URL there is no llms.txt. Without
PARROT_REPO_URL there are no edit links."""

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

_REPO_URL = os.environ.get("PARROT_REPO_URL")
_SITE_URL = os.environ.get("PARROT_SITE_URL")
_CONTACT = os.environ.get("PARROT_CONTACT")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    project = tomllib.loads((Path(config.docs_dir).parent / "pyproject.toml").read_text())
    config.copyright = f"Parrot {project['project']['version']}, MIT licence"
    if _REPO_URL is not None:
        config.repo_url = _REPO_URL
        config.edit_uri = "edit/main/docs/"
        config.theme["features"] = [*config.theme["features"], "content.action.edit"]
    return config


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Add llms.txt (https://llmstxt.org): the pages, for programs that read documentation."""
    if _SITE_URL is None:
        return
    head = [f"# {config.site_name}", f"> {config.site_description}"]
    contact = [f"Contact: {_CONTACT}"] if _CONTACT is not None else []
    text = "\n\n".join([*head, *contact, "\n".join(_lines(nav.items))]) + "\n"
    files.append(File.generated(config, "llms.txt", content=text))


def _lines(items: list[Any]) -> Iterator[str]:
    for item in items:
        if isinstance(item, Section):
            yield f"\n## {item.title}\n"
            yield from _lines(item.children)
        elif isinstance(item, Page):
            yield f"- [{item.title}]({str(_SITE_URL).rstrip('/')}/{item.file.url})"
