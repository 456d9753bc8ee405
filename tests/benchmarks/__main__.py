"""Run benchmarks: `python -m tests.benchmarks [NAME] [--json]`; without a name, all of them."""

import argparse
import importlib
import json

from connector.bench import BENCHMARKS as RATIOS

BENCHMARKS = {**RATIOS, "restart": "tests.benchmarks.restart"}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", choices=sorted(BENCHMARKS))
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    for name in [arguments.name] if arguments.name else sorted(BENCHMARKS):
        module = importlib.import_module(BENCHMARKS[name])
        rows = module.measure()
        print(json.dumps(rows, indent=2) if arguments.json else module.table(rows), flush=True)


if __name__ == "__main__":
    main()
