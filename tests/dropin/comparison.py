"""Outcomes of a suite with PyPI's renderers and with this project: a table by file, and what must not be."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS = ("differs on purpose", "not applicable")
_OUTCOMES = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Difference:
    """A row of differences.toml."""

    file: str
    tests: Sequence[str]
    kind: str
    reason: str
    suite: str = "renderers-0.1.12"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"differences.toml: {self.file}: kind {self.kind!r} is none of {KINDS}")
        if not self.reason.strip():
            raise ValueError(f"differences.toml: {self.file}: the reason is empty")

    def covers(self, test: str) -> bool:
        return any(self.matches(pattern, test) for pattern in self.tests)

    def matches(self, pattern: str, test: str) -> bool:
        """Whether a pattern of this row is one of `test`, an id as pytest writes it."""
        file, _, name = test.partition("::")
        expression = ".*".join(map(re.escape, pattern.split("*")))
        return Path(file).name == self.file and re.fullmatch(expression, name, re.DOTALL) is not None


def read_differences(path: Path, suite: str, tests: Iterable[str]) -> list[Difference]:
    """The rows of a suite for the files of these tests."""
    rows = tomllib.loads(path.read_text(encoding="utf-8")).get("difference", [])
    files = {Path(_file(test)).name for test in tests}
    differences = (Difference(**row) for row in rows)
    return [difference for difference in differences if difference.suite == suite and difference.file in files]


def files_of_one(stock: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, list[str]]:
    """By the package that has no figures of them, the files of which only the other one has."""
    files = {"PyPI's renderers": set(map(_file, stock)), "this project": set(map(_file, ours))}
    every = set().union(*files.values())
    return {package: sorted(every - found) for package, found in files.items() if every - found}


def of_common_files(stock: Mapping[str, str], ours: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The figures of the files of which both have some."""
    common = set(map(_file, stock)) & set(map(_file, ours))
    here, there = ({test: figures[test] for test in figures if _file(test) in common} for figures in (stock, ours))
    return here, there


def lost(stock: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """The tests that pass with PyPI's package and not with this project, be it that they cannot be collected."""
    return sorted(test for test, outcome in stock.items() if outcome == "passed" and ours.get(test) != "passed")


def violations(
    stock: Mapping[str, str], ours: Mapping[str, str], differences: Sequence[Difference], drawn: Sequence[str] = ()
) -> Iterator[str]:
    """What must not be, a line each. `differences` are reviewed; of tests that begin as `drawn` a part was run."""
    missing = lost(stock, ours)
    for test in missing:
        if not any(difference.covers(test) for difference in differences):
            yield f"{test}: passed with PyPI's renderers, {ours.get(test, 'not collected')} here"
    whole = [difference for difference in differences if not f"tests/{difference.file}".startswith(tuple(drawn))]
    for difference in whole:
        for pattern in difference.tests:
            if not any(difference.matches(pattern, test) for test in missing):
                yield f"differences.toml: {difference.file}: {pattern!r} matches no test that differs; remove it"


def table(stock: Mapping[str, str], ours: Mapping[str, str] | None, differences: Sequence[Difference]) -> str:
    """By file: outcomes with either package, and how many of the tests that only PyPI's passes are reviewed."""
    files = sorted({_file(test) for test in (*stock, *(ours or ()))})
    heads = ["", *_OUTCOMES]
    if ours is not None:
        heads = ["", *(f"stock {outcome}" for outcome in _OUTCOMES)]
        heads += [*(f"ours {outcome}" for outcome in _OUTCOMES), "only ours passes", *KINDS, "unreviewed"]
    rows = [heads]
    for file in [*files, "all"]:
        mine = {test: outcome for test, outcome in stock.items() if file in (_file(test), "all")}
        row = [file, *_counts(mine.values())]
        if ours is not None:
            here = {test: outcome for test, outcome in ours.items() if file in (_file(test), "all")}
            kinds = Counter(_kind(test, differences) for test in lost(mine, here))
            gained = lost(here, mine)
            row += [*_counts(here.values()), str(len(gained)), *(str(kinds[kind]) for kind in (*KINDS, ""))]
        rows.append(row)
    widths = [max(map(len, [*files, "all"])), *map(len, heads[1:])]
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if column == 0 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _file(test: str) -> str:
    return test.partition("::")[0].removeprefix("tests/")


def _counts(outcomes: Iterable[str]) -> list[str]:
    counts = Counter("failed" if outcome == "error" else outcome for outcome in outcomes)
    return [str(counts[outcome]) for outcome in _OUTCOMES]


def _kind(test: str, differences: Sequence[Difference]) -> str:
    return next((difference.kind for difference in differences if difference.covers(test)), "")
