"""Processor time of rendering and bridging, compared with the PyPI package `renderers` and transformers in one run.

    python benchmarks/render.py [--check]

The first run installs the other package into a virtual environment under the cache directory. The sides alternate
call by call, so that a change of the machine's speed affects both; before that, their tokens must be equal. Times are
medians of processor time. Model: Qwen3's tokenizer and template. Linux only: peak memory is read from /proc.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from render_jobs import TOOL_CONVERSATION, TOOLS, Bridges, Job, always, new_conversations, same_conversation
from render_sides import Worker, environment_of, install_peer
from rich.console import Console
from rich.table import Table

MODEL = "qwen-3"
GROWTH_NOISE = 2e-5  # seconds; the difference between two runs of the same bridge
TURNS = (1, 5, 20)
TRACED_TEMPLATES = (
    "trl/qwen2_5",
    "trl/qwen3",
    "trl/qwen3_vl",
    "trl/qwen3_5_think",
    "trl/llama3_1",
    "trl/gemma4",
    "trl/gptoss",
    "trl/glm4moe",
    "own/deepseek-v3",
    "trl/nemotron_3_nano",
    "own/glm-5",
    "own/minimax-m3",
)


@dataclass(frozen=True)
class Comparison:
    """One job done by several workers: `calls` maps a column to the worker and the name of its call."""

    name: str
    calls: Mapping[str, tuple[Worker, str]]
    job: Callable[[str], Job]


def require_agreement(comparison: Comparison, **referees: tuple[Worker, str]) -> None:
    """End the benchmark with the first difference unless all workers, and the referees, return the same."""
    job = comparison.job(f"{comparison.name}, agreed")
    results = {who: worker.answer(call, job) or [] for who, (worker, call) in {**comparison.calls, **referees}.items()}
    (first, expected), *others = results.items()
    for who, result in others:
        if result != expected or not result:
            pairs = enumerate(zip(expected, result, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(result)))
            here, there = expected[at : at + 20], result[at : at + 20]
            raise SystemExit(f"{comparison.name}: from {at} on, {first} returns {here!r} and {who} returns {there!r}")


def measure(comparisons: Sequence[Comparison], *, rounds: int, calls_a_round: int = 3) -> list[dict[str, float]]:
    """Median processor seconds by column, for each comparison; each round runs all of them."""
    seconds_of: list[dict[str, list[float]]] = [
        {column: [] for column in comparison.calls} for comparison in comparisons
    ]
    for turn in range(rounds):
        for comparison, seconds in zip(comparisons, seconds_of, strict=True):
            jobs = [comparison.job(f"{comparison.name} {turn} {index}") for index in range(calls_a_round)]
            for column, (worker, call) in comparison.calls.items():
                seconds[column] += worker.seconds(call, jobs)
    return [{column: median(values) for column, values in seconds.items()} for seconds in seconds_of]


class Report:
    """Prints tables and counts the targets that were missed."""

    def __init__(self) -> None:
        self.console = Console(width=140)
        self.missed = 0

    @contextmanager
    def table(self, title: str, *columns: str) -> Iterator[Table]:
        table = Table(title=title, title_justify="left")
        for column in ("", *columns, "target", "met"):
            table.add_column(column, justify="right" if column else "left")
        yield table
        self.console.print(table)

    def check(self, value: float, target: float, target_text: str) -> tuple[str, str]:
        """Returns the last two cells of a row: the target, and whether `value` is within it."""
        if value <= target:
            return target_text, "[green]ok[/]"
        self.missed += 1
        return target_text, "[red]MISSED[/]"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f} ms"


def of(turns: int) -> str:
    return f"{turns} turn" if turns == 1 else f"{turns} turns"


class RenderKind(NamedTuple):
    call: str
    jobs: Callable[[int], Callable[[str], Job]]
    target: float
    target_text: str


RENDERS = {
    "new text": RenderKind("render", new_conversations, 1.2, "<= 1.2x"),
    "new text, all columns read": RenderKind("render_with_columns", new_conversations, 1.2, "<= 1.2x"),
    "text rendered before": RenderKind("render", same_conversation, 1 / 8, "<= 1/8"),
}


def compare_renders(report: Report, ours: Worker, peer: Worker) -> None:
    comparisons, kinds = [], []
    for name, kind in RENDERS.items():
        for turns in TURNS:
            calls = {"ours": (ours, kind.call), "peer": (peer, "render"), "stock": (peer, "apply_chat_template")}
            comparisons.append(Comparison(f"{name}, {of(turns)}", calls, kind.jobs(turns)))
            kinds.append(kind)
            require_agreement(comparisons[-1])
    size = len(ours.answer("render", same_conversation(20)(""))) / 20
    title = f"Rendering whole conversations; a turn is question, tool call and tool result, {size:,.0f} tokens"
    with report.table(title, "mmrollouts", "renderers", "transformers", "ours/renderers") as table:
        for comparison, kind, seconds in zip(comparisons, kinds, measure(comparisons, rounds=15), strict=True):
            ratio = seconds["ours"] / seconds["peer"]
            figures = map(milliseconds, seconds.values())
            table.add_row(
                comparison.name, *figures, f"{ratio:.3f}x", *report.check(ratio, kind.target, kind.target_text)
            )


BRIDGES = {"bridge": "no history given", "bridge_with_history": "previous_messages given"}


def compare_bridges(report: Report, ours: Worker, peer: Worker) -> None:
    comparisons = []
    for role in ("tool", "user"):
        for call, given in BRIDGES.items():
            for turns in TURNS:
                calls = {"ours": (ours, call), "peer": (peer, "bridge")}
                name = f"{role} message behind {of(turns)}, {given}"
                comparisons.append(Comparison(name, calls, bridges(ours, turns, role)))
                require_agreement(comparisons[-1], whole=(ours, "render"))
    with report.table("Bridging one new message", "mmrollouts", "renderers", "ours/renderers") as table:
        for comparison, seconds in zip(comparisons, measure(comparisons, rounds=25), strict=True):
            ratio = seconds["ours"] / seconds["peer"]
            figures = map(milliseconds, seconds.values())
            table.add_row(comparison.name, *figures, f"{ratio:.2f}x", *report.check(ratio, 0.7, "<= 0.7x"))


def compare_growth(report: Report, ours: Worker, peer: Worker) -> None:
    """The cost that earlier turns add to a bridge; the new message is short, so that the difference is visible."""
    few, many = TURNS[0], TURNS[-1]
    title = f"Cost of a bridge behind {many} turns minus that behind {few}; new message of 8 words"
    with report.table(title, "mmrollouts", "renderers", "copying the prompt") as table:
        for call, given in BRIDGES.items():
            calls = {"ours": (ours, call), "peer": (peer, "bridge"), "copy": (ours, "copy")}
            comparisons = [
                Comparison(f"growth to {turns}, {given}", calls, bridges(ours, turns, "tool", words=8))
                for turns in (few, many)
            ]
            before, after = measure(comparisons, rounds=30)
            growth = {column: after[column] - before[column] for column in calls}
            target_cells = report.check(growth["ours"], growth["copy"] + GROWTH_NOISE, "<= copying + 0.02 ms")
            table.add_row(given, *(f"+{milliseconds(more)}" for more in growth.values()), *target_cells)


def bridges(ours: Worker, turns: int, role: str, **options: int) -> Bridges:
    return Bridges(lambda job: ours.answer("render", job), ours.answer("turn_end", {}), turns, role, **options)


def compare_tracing(report: Report, ours: Worker, peer: Worker) -> None:
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    comparisons = []
    for name in TRACED_TEMPLATES:
        job = {"template": name, "messages": TOOL_CONVERSATION, "tools": TOOLS, "variables": variables}
        calls = {"traced": (ours, "print_template"), "plain": (peer, "print_template")}
        comparisons.append(Comparison(name, calls, always(job)))
        require_agreement(comparisons[-1])
    title = f"Running a template over a tool conversation of {len(TOOL_CONVERSATION)} messages"
    with report.table(title, "traced", "transformers' Jinja", "traced/plain") as table:
        for comparison, seconds in zip(comparisons, measure(comparisons, rounds=15, calls_a_round=5), strict=True):
            ratio = seconds["traced"] / seconds["plain"]
            figures = map(milliseconds, seconds.values())
            table.add_row(comparison.name, *figures, f"{ratio:.2f}x", *report.check(ratio, 2.5, "<= 2.5x"))


# From /proc: the peak of getrusage for a child includes its parent's size at the fork.
_IMPORT = r"""
import re, time
started = time.perf_counter()
{statement}
seconds = time.perf_counter() - started
print(seconds, int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) / 1024)
"""


def compare_imports(report: Report, peer_python: Path) -> None:
    statements: dict[str, tuple[str | Path, str, str]] = {
        "mmrollouts": (sys.executable, "ours", "import renderers"),
        "renderers": (peer_python, "peer", "import renderers"),
        "Python alone": (sys.executable, "ours", "pass"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in statements}
    megabytes: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(5):
        for name, (python, side, statement) in statements.items():
            # -P: do not import from the working directory.
            command = [str(python), "-P", "-c", _IMPORT.format(statement=statement)]
            done = subprocess.run(command, env=environment_of(side), check=True, capture_output=True, text=True)
            elapsed, peak = map(float, done.stdout.split())
            seconds[name].append(elapsed)
            megabytes[name].append(peak)
    with report.table("`import renderers` in a fresh process", *statements) as table:
        time, memory = min(seconds["mmrollouts"]), max(megabytes["mmrollouts"])
        figures = (f"{min(values):.3f} s" for values in seconds.values())
        table.add_row("time, best of 5", *figures, *report.check(time, 0.25, "< 0.25 s"))
        figures = (f"{max(values):.1f} MB" for values in megabytes.values())
        table.add_row("peak memory, worst", *figures, *report.check(memory, 60, "< 60 MB"))


def corpus() -> Any:
    """`tests/renderers/corpus.py`, which finds real tokenizers and templates in packages that the tests depend on."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "renderers"))
    return importlib.import_module("corpus")


def compare(report: Report) -> None:
    peer_python = install_peer()
    model_dir, sources = corpus().model_dir(MODEL), corpus().templates()
    with tempfile.TemporaryDirectory() as folder:
        templates = Path(folder) / "templates.json"
        templates.write_text(json.dumps({name: sources[name] for name in TRACED_TEMPLATES}), encoding="utf-8")
        with (
            Worker("ours", Path(sys.executable), model_dir, templates) as ours,
            Worker("peer", peer_python, model_dir, templates) as peer,
        ):
            compare_renders(report, ours, peer)
            compare_bridges(report, ours, peer)
            compare_growth(report, ours, peer)
            compare_tracing(report, ours, peer)
    compare_imports(report, peer_python)


def main() -> None:
    parser = argparse.ArgumentParser(description="Rendering beside the PyPI package renderers and transformers.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    options = parser.parse_args()
    report = Report()
    compare(report)
    report.console.print(f"{report.missed} targets missed" if report.missed else "all targets met")
    if options.check and report.missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
