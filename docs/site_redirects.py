"""A hook of mkdocs: the old addresses of moved pages lead to the new pages.

The old and the new addresses stand in mkdocs.yml, under `extra.redirects`."""

import posixpath
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>This page has moved</title>
<link rel="canonical" href="{target}">
<script>location.replace("{target}" + location.hash)</script>
<meta http-equiv="refresh" content="0; url={target}">
<p>This page has moved to <a href="{target}">{target}</a>.</p>
</html>
"""


def on_post_build(config: MkDocsConfig) -> None:
    """Write one page for each old address. Raises `FileNotFoundError` for an unknown target."""
    site = Path(config.site_dir)
    for old, new in config.extra["redirects"].items():
        target, _, anchor = new.partition("#")
        if not (site / target).exists():
            raise FileNotFoundError(f"{old} redirects to {target}, which is not a page")
        link = posixpath.relpath(target, posixpath.dirname(old) or ".")
        page = site / old
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_PAGE.format(target=f"{link}#{anchor}" if anchor else link))
