"""Tables of the result files: their provenance and their commands."""

from benchmark.results import UNKNOWN, load, names
from benchmark.tables.markdown import Row, table


def origins() -> str:
    """Every result file: code, time, machine, and whether its figures are outdated."""
    rows = []
    for name in names():
        origin = load(name)["provenance"]
        note = origin.get("source") or origin.get("historical", "")
        rows.append([f"[{name}]({name})", _commit(origin), _when(origin), _device(origin), note])
    return table(["file", "commit", "when", "device", "notes"], rows)


def commands() -> str:
    """The command that reproduces each file's figures today."""
    lines = []
    for name in names():
        origin = load(name)["provenance"]
        if "source" not in origin:
            lines.append(f"- `{origin.get('again', origin['command'])}`\n")
    return "".join(lines)


def _commit(origin: Row) -> str:
    if "source" in origin:
        return ""
    if origin["commit"] == UNKNOWN:
        return f"{origin['changed_in']} or earlier"
    return f"{origin['commit']}{' with changes' if origin.get('dirty') else ''}"


def _when(origin: Row) -> str:
    return "" if "source" in origin else str(origin["when"])


def _device(origin: Row) -> str:
    return "" if "source" in origin else str(origin["device"])
