"""Runs the tests of programs that use PyPI's `renderers` with that package (`stock`) and with this project (`ours`).

    python tests/dropin/main.py stock                    # figures with PyPI's package, kept in the cache
    python tests/dropin/main.py ours                     # figures with this project, as it is in the working tree
    python tests/dropin/main.py compare                  # table and verdict from the last figures of both
    python tests/dropin/main.py all                      # the three after each other

`--suite NAME` takes one of the suites; without it all are run. `--test FILE_OR_ID` (with one suite) runs only that and
replaces only its figures, `tests/test_bridge.py` for instance. The suite of PyPI's renderers takes hours in one go, so
it is run a few files at a time, and their figures are kept before the next ones begin; a quarter of it is run, another
one for each commit. With this project only those of its tests are run that pass with PyPI's package. A comparison
covers the files that have figures of both packages.
Needs the project's `dev` extra and the package index.
Sources, environments, models and figures are kept in ~/.cache/mmrollouts/dropin, or in $MMROLLOUTS_DROPIN_CACHE.
What a run printed is in `runs/SUITE-PACKAGE/output.txt` there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "renderers"))  # the corpus of templates and tokenizers

import comparison
import suites
from environments import InstallError, Package
from sources import CACHE, SourceError

_MOST_LINES = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["stock", "ours", "compare", "all"])
    parser.add_argument("--suite", choices=list(suites.SUITES), action="append")
    parser.add_argument("--test", metavar="FILE_OR_ID", action="append", default=[])
    chosen = parser.parse_args()
    if chosen.test and len(chosen.suite or ()) != 1:
        parser.error("--test needs one --suite")
    status = 0
    for name in chosen.suite or suites.SUITES:
        suite = suites.SUITES[name]
        for package in _packages(chosen.step):
            for tests in [chosen.test] if chosen.test else suites.portions(suite):
                done = suites.run(suite, package, tests, only=_only(suite, package), explain=bool(chosen.test))
                print(f"\n{name}, {package}, {done.seconds:.0f} s\n" + comparison.table(done.outcomes, None, []))
                _keep(_figures(name, package), done.outcomes, tests)
        if chosen.step in ("compare", "all"):
            status |= _compare(suite)
    return status


def _packages(step: str) -> list[Package]:
    return {"stock": ["stock"], "ours": ["ours"], "compare": [], "all": ["stock", "ours"]}[step]  # type: ignore[return-value]


def _only(suite: suites.Suite, package: Package) -> list[str] | None:
    """What is run with this project of a suite that takes hours: the tests that pass with PyPI's package."""
    figures = _figures(suite.name, "stock")
    if package == "stock" or suite.is_consumer or not figures.is_file():
        return None
    return [test for test, outcome in json.loads(figures.read_text(encoding="utf-8")).items() if outcome == "passed"]


def _keep(figures: Path, outcomes: dict[str, str], tests: list[str]) -> None:
    """Write the figures of a run; of a run of `tests`, what the file says of all others stays."""
    figures.parent.mkdir(exist_ok=True)
    kept = json.loads(figures.read_text(encoding="utf-8")) if tests and figures.is_file() else {}
    others = {test: outcome for test, outcome in kept.items() if not test.startswith(tuple(tests))}
    figures.write_text(json.dumps({**others, **outcomes}, indent=1), encoding="utf-8")


def _figures(suite: str, package: Package) -> Path:
    return CACHE / "figures" / f"{suite}-{package}.json"


def _compare(suite: suites.Suite) -> int:
    stock, ours = (json.loads(_figures(suite.name, package).read_text()) for package in ("stock", "ours"))
    if not suite.is_consumer:  # it is run a few files at a time
        for package, without in comparison.files_of_one(stock, ours).items():
            print(f"{suite.name}: no figures with {package} of {', '.join(without)}")
        stock, ours = comparison.of_common_files(stock, ours)
    reviewed = comparison.read_differences(Path(__file__).with_name("differences.toml"), suite.name, {*stock, *ours})
    print(f"\n{suite.name}\n" + comparison.table(stock, ours, reviewed))
    found = list(comparison.violations(stock, ours, reviewed, suite.drawn))
    for line in found[:_MOST_LINES]:
        print(line)
    print(f"{suite.name}: {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (InstallError, SourceError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
