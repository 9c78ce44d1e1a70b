"""Pages and README show exactly the figures of the result files."""

import re

import pytest

from benchmark.results import RESULTS, ROOT, names
from benchmark.tables.__main__ import PAGES, TABLES
from benchmark.tables.markdown import digits, filled, spread, table


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_shows_the_figures_of_the_result_files(page):
    text = page.read_text()
    assert filled(text, TABLES) == text, "run: python -m benchmark.tables"


def test_every_table_is_on_a_page():
    shown = {name.split()[0] for page in PAGES for name in marked(page.read_text())}
    assert shown == TABLES.keys()


def marked(text: str) -> list[str]:
    return re.findall(r"<!-- table: ([^>]*?) -->", text)


def test_each_table_of_figures_names_its_files():
    text = (ROOT / "docs" / "performance.md").read_text()
    tables = dict(re.findall(r"<!-- table: (\w+) -->\n(.*?)<!-- end -->", text, re.DOTALL))
    for name, content in tables.items():
        files = re.findall(r"\(\.\./benchmark/results/(\S+?\.json)\)", content)
        assert (files != []) == (name != "won"), name  # README has the links of this table
        assert set(files) <= set(names())


def test_the_measured_figures_of_readme_are_generated():
    text = (ROOT / "README.md").read_text()
    (generated,) = re.findall(r"<!-- table: won -->\n(.*?)<!-- end -->", text, re.DOTALL)
    unit = re.compile(r"\d\S* (ms|tokens/s|a second|times)\b|\dx\b|\*\*\d")
    assert len(unit.findall(generated)) >= 3
    claims = [line for line in text.replace(generated, "").splitlines() if unit.search(line)]
    assert claims == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_a_docs_page_has_no_results_but_generated_ones(page):
    """Tables of figures belong to benchmark/results. Tables in docs/ define things."""
    text = re.sub(
        r"<!-- (table|fields|shapes).*?<!-- end -->", "", page.read_text(), flags=re.DOTALL
    )
    rows = [line for line in text.splitlines() if line.startswith("|")]
    measured = [row for row in rows if len(re.findall(r"\| *\*{0,2}\d[\d.,]*\S* ", row)) >= 2]
    assert measured == []


def test_the_result_pages_name_every_file():
    index = (RESULTS / "README.md").read_text()
    assert all(f"({name})" in index for name in names())


def test_numbers_keep_three_digits():
    assert [digits(value) for value in (0.0123, 0.5, 9.82, 14.5, 167.02, 10278.0)] == [
        "0.0123",
        "0.500",
        "9.82",
        "14.5",
        "167",
        "10,278",
    ]
    assert spread([2.0, 1.0], " s") == "1.00 to 2.00 s"
    assert table(["a", "b"], [[1, None]]) == "| a | b |\n| --- | --- |\n| 1 |  |\n"


def test_filling_replaces_only_text_between_the_markers():
    page = "a\n<!-- table: t x -->\nold\n<!-- end -->\nb\n"
    once = filled(page, {"t": lambda name: f"new {name}\n"})
    assert once == "a\n<!-- table: t x -->\nnew x\n<!-- end -->\nb\n"
