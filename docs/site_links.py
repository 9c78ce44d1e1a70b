"""Hooks of mkdocs: files outside docs/ that pages link to are copied to the site, so that links
work in the repository and on the site."""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"(\]\()((?!https?:|mailto:|#)[^)#\s]+)")
_CODE_IN_ROW = re.compile(r"`[^`]+`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add all files that pages link to, directly or indirectly: pages, results, sources."""
    root = Path(config.docs_dir).parent
    waiting = [f"docs/{page.src_uri}" for page in files.documentation_pages()]
    waiting += [path for path in _named(config.nav) if not (root / "docs" / path).exists()]
    known = set(waiting)
    for path in waiting:  # The loop appends to the list.
        if not path.startswith("docs/"):
            files.append(File.generated(config, path, abs_src_path=str(root / path)))
        if path.endswith(".md"):
            found = set(_targets(path, (root / path).read_text("utf-8")))
            new = sorted(target for target in found - known if _is_taken_in(root, target))
            known.update(new)
            waiting += new
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirect links to files outside docs/ to their copies, and remove links to folders."""
    here = page.file.src_uri
    path = here if files.get_file_from_path(here).generated_by else f"docs/{here}"
    root = Path(config.docs_dir).parent

    def turned(match: re.Match[str]) -> str:
        target = _resolved(path, match[2])
        place = "index.md" if target == "README.md" else target.removeprefix("docs/")
        return match[1] + posixpath.relpath(place, posixpath.dirname(here) or ".")

    def plain(match: re.Match[str]) -> str:
        is_folder = (root / _resolved(path, match[2])).is_dir()
        return match[1] if is_folder else match[0]

    markdown = re.sub(r"\[([^\]]*)\]\(((?!https?:|#)[^)#\s]+)\)", plain, markdown)
    lines = _LINK.sub(turned, markdown).splitlines()
    return "\n".join(_without_escapes(line) if line.startswith("|") else line for line in lines)


def _without_escapes(row: str) -> str:
    """A table row with unescaped `|` in code. Python-Markdown would show the backslashes."""
    return _CODE_IN_ROW.sub(lambda code: code[0].replace("\\|", "|"), row)


def _named(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list):
        for part in nav:
            yield from _named(part)
    elif isinstance(nav, dict):
        for part in nav.values():
            yield from _named(part)


def _targets(path: str, text: str) -> list[str]:
    return [_resolved(path, match[2]) for match in _LINK.finditer(text)]


def _resolved(path: str, link: str) -> str:
    """The path in the repository to which a link in the file at `path` leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _is_taken_in(root: Path, path: str) -> bool:
    """Whether to copy the file. The README is left out: the site has its own first page."""
    return path != "README.md" and not path.startswith("docs/") and (root / path).is_file()
