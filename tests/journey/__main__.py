"""List the functions of each journey. `--write` renews the list in docs/internals/architecture.md.
`--json` prints the lists for tests, from a process in which nothing else has run."""

import json
import sys

from tests.journey.journeys import measured
from tests.journey.page import PAGE, rendered


def main() -> None:
    passed, borrowed = measured()
    names = sys.argv[1:]
    if names == ["--write"]:
        PAGE.write_text(rendered(PAGE.read_text(), passed))
        return
    if names == ["--json"]:
        figures = {
            name: {
                "files": sorted(journey.files),
                "modules": list(journey.modules),
                "stateful": sorted(".".join(kind) for kind in journey.stateful),
                "calls": journey.num_calls,
            }
            for name, journey in passed.items()
        }
        page = rendered(PAGE.read_text(), passed)
        print(json.dumps({"journeys": figures, "borrowed": borrowed, "page": page}))
        return
    for name, journey in passed.items():
        stateful = len(journey.stateful)
        print(
            f"{name}: {len(journey.modules)} modules, {stateful} stateful classes, "
            f"{len(journey.functions)} functions, {journey.num_calls} calls"
        )
        for module, count in journey.modules.items() if name in names else ():
            print(f"    {module} {count}")


if __name__ == "__main__":
    main()
