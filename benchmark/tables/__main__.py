"""`python -m benchmark.tables` updates the tables of all pages."""

import inspect

from benchmark.results import RESULTS, ROOT
from benchmark.tables import device, figures, generic, origins, service
from benchmark.tables.markdown import Table, filled

TABLES: dict[str, Table] = {
    name: function
    for module in (figures, generic, service, device, origins)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and not name.startswith("_")
}
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *RESULTS.glob("*.md")]


def main() -> None:
    for path in PAGES:
        path.write_text(filled(path.read_text(), TABLES))


if __name__ == "__main__":
    main()
