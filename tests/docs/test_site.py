"""The documentation builds as a site with all pages, without broken links and external files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.async_api import async_playwright

from tests.support.programs import chromium

ROOT = Path(__file__).parents[2]
# Addresses that a browser fetches by itself. It follows `<a href>` only after a click.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(https?:)?//"
    r"|<link\b(?![^>]*rel=\"?(?:canonical|prev|next))[^>]*\bhref=\"?(https?:)?//"
)


ENVIRONMENT = {
    "NO_MKDOCS_2_WARNING": "1",
    "PARROT_SITE_URL": "https://docs.example",
    "PARROT_REPO_URL": "https://code.example/parrot",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_exists(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).exists(), page
    assert (site / "INSTALL.html").exists()
    assert (site / "benchmark" / "results" / "serve_calls.json").exists()


def test_a_link_out_of_the_docs_leads_to_the_repository(site: Path) -> None:
    page = (site / "internals" / "architecture.html").read_text()
    assert 'href="../benchmark/results/memory.html"' in page
    assert 'href="configuration.html"' in (site / "INSTALL.html").read_text()


def test_an_old_address_leads_to_the_new_page(site: Path) -> None:
    assert 'url=internals/scheduling.html"' in (site / "scheduling.html").read_text()


def test_pages_have_a_version_an_edit_link_and_a_place_in_llms_txt(site: Path) -> None:
    page = (site / "concepts.html").read_text()
    assert re.search(r"Parrot \d+\.\d+\.\d+", page)
    assert 'href="https://code.example/parrot/edit/main/docs/concepts.md"' in page
    assert "- [Concepts](https://docs.example/concepts.html)" in (site / "llms.txt").read_text()


def test_tables_show_no_escapes(site: Path) -> None:
    assert "\\|" not in re.sub(r"(?s)<pre.*?</pre>", "", (site / "api.html").read_text())


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not FETCHED.search(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", style.read_text()), style


async def test_search_works_from_a_folder(site: Path) -> None:
    """Search in a browser without a server."""
    asked: list[str] = []
    errors: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"]
        )
        page = await browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        await page.goto((site / "index.html").as_uri())
        await page.click("input[name=query]")
        await page.locator("input[name=query]").press_sequentially("as_completed")
        found = page.locator(".md-search-result__link[href*='python_api.html']").first
        await found.wait_for(state="attached")
        await browser.close()
    assert errors == []
    assert {url.partition(":")[0] for url in asked} <= {"file", "about", "data"}
