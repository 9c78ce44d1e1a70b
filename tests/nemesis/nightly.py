"""The nightly run: all faults for 2 hours, in parts of 30 minutes.

    python -m tests.nemesis.nightly

Each part has its own seed, which is printed. `python -m tests.nemesis --seed SEED --minutes 30`
repeats a part. The command fails if a promise was broken in any part."""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

SEEDS_OF_A_PART = 10_000
SHARES = ("--standby", "0.2", "--shards", "0.2", "--embedded", "0.1", "--divided", "0.05")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the nemesis in parts.")
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes of each part")
    parser.add_argument("--parallel", type=int, default=2, help="rounds at once")
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the first part; default: the day"
    )
    parser.add_argument("--folder", type=Path, default=Path("nemesis-nightly"))
    args = parser.parse_args()
    first = int(time.time() // 86_400) * 1_000_000 if args.seed is None else args.seed
    args.folder.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for part in range(args.parts):
        seed = first + part * SEEDS_OF_A_PART
        output = args.folder / f"seed-{seed}.json"
        words = [sys.executable, "-m", "tests.nemesis", "--seed", str(seed), *SHARES]
        words += ["--minutes", f"{args.minutes:g}", "--parallel", str(args.parallel)]
        words += ["--keep", str(args.folder / "kept"), "--output", str(output)]
        print(f"part {part + 1} of {args.parts}, seed {seed}: {shlex.join(words)}", flush=True)
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        report = json.loads(output.read_text())
        found = len(report.get("violations", ())) + len(report.get("defects", ()))
        totals = {
            name: sum(row[name] for row in report["rows"])
            for name in ("rounds", "runs", "programs", "calls", "lost", "doubled", "hung", "other")
        }
        print(f"    {totals}, kills {report['kills']}, wrong {found}: {output}", flush=True)
        wrong += found
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
