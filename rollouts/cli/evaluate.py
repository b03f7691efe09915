"""`rollouts eval`: evaluate a model on tasks, with the episodes of `rollouts run` and statistics over them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from rollouts.cli.options import EPISODE_OPTIONS, MODEL_OPTIONS, SET, changes_of, model_changes, takes
from rollouts.cli.run.command import (
    DryRun,
    Limit,
    RerunFailed,
    Resume,
    check_rerun,
    checked_parts,
    end_dry_run,
    exit_on_problems,
    run_and_report,
)
from rollouts.terminal.table import Column, print_table
from rollouts.terminal.text import exit_with_error, print_line, print_note, print_warning, printable_line

if TYPE_CHECKING:
    from rollouts.evaluation.results import EvaluationResults
    from rollouts.run_config.config_file import Change, ConfigFile
    from rollouts.run_config.output import OutputDirectory
    from rollouts.run_config.run_parts import RunParts

#: Of an evaluation without a configuration file. Fewer tokens cut the answers of models that reason.
_MAX_TOKENS: Final = 2048

_TASK_KINDS: Final = {".jsonl": "jsonl", ".parquet": "parquet"}

_OPTIONS: Final = (*MODEL_OPTIONS, *EPISODE_OPTIONS, SET)


@takes(*_OPTIONS)
def evaluate(
    tasks: Annotated[
        str,
        typer.Argument(
            metavar="TASKS|CONFIG",
            help="A file of tasks (.jsonl, .parquet), an import path of tasks (module:name), or a configuration file "
            "of `rollouts run` or `train` (.toml), whose values the options replace.",
        ),
    ],
    limit: Limit = None,
    resume: Resume = False,
    rerun_failed: RerunFailed = False,
    dry_run: DryRun = False,
    **values: Any,
) -> None:
    """Evaluate a model on tasks: rewards, pass@k and pass^k with 95 % intervals clustered by task.

    Writes results.json, the trajectories and a report to the output directory, and prints one table.
    """
    from rollouts.run_config.output import prepare_output
    from rollouts.run_config.parts import make_tally

    check_rerun(rerun_failed, resume=resume, limit=limit)
    with exit_on_problems():
        file = _of_held_out_tasks(_configuration(tasks, values))
        make_tally(file, file.config.group_size)  # an error now, not after the episodes
        parts = checked_parts(file, limit=limit, dry_run=dry_run).with_all_groups()
        if left_out := [name for name in ("skip_group", "mode") if getattr(file.config, name) is not None]:
            print_note(f"every group counts: {' and '.join(left_out)} of {file.path} are not used")
        if dry_run:
            end_dry_run(parts, resume=resume)
            return
        output = prepare_output(file, resume=resume)

        def show(summary: Mapping[str, Any]) -> None:
            results = _results(parts, output, complete=summary["complete"])
            results.write(output.results)
            _print_results(results, Console())
            print_line(f"in {output.path}: results.json, trajectories.mmr, metrics.jsonl, summary.json")

        run_and_report(parts, output, limit, None, show, rerun_failed=rerun_failed)


def _configuration(tasks: str, values: Mapping[str, Any]) -> ConfigFile:
    """The configuration of the command. Raises `RunConfigError`."""
    from rollouts.run_config.config_file import checked_config, engine_kind, read_values
    from rollouts.run_config.errors import key_text

    environment = _environment_changes(values)
    if Path(tasks).suffix == ".toml":
        written = read_values(Path(tasks))
        model = model_changes(values, configured=engine_kind(written))
        given = [*model, *environment, *changes_of(_OPTIONS, values)]
        if "train" in written:  # its [output] is the directory of the training run
            renderer = written.get("renderer")
            trained = renderer.get("model") if isinstance(renderer, dict) else None
            given.insert(0, _default_output(tasks, values["model"] or trained))
        file = checked_config(Path(tasks), written, given)
        unused = [change.key for change in given if change.key[0] == "tasks"]
        if unused and file.config.evaluation.tasks is not None:
            cure = f"set evaluation.{key_text(unused[0])}, or --set evaluation.tasks=null evaluates these"
            raise file.error(unused[0], f"the tasks of [evaluation] are evaluated, and these are not used; {cure}")
        return file
    if not environment:
        exit_with_error("pass either --score FILE.py:FUNCTION, which scores an answer, or --environment FILE.py:NAME")
    changes = [*_task_changes(tasks), *model_changes(values, configured=None), *environment]
    changes.insert(0, _default_output(tasks, values["model"]))
    defaults = {"sampling": {"max_tokens": _MAX_TOKENS}}
    return checked_config(Path("options"), defaults, [*changes, *changes_of(_OPTIONS, values)])


def _default_output(tasks: str, model: str | None) -> Change:
    """The directory where neither --out nor --set names one."""
    from rollouts.run_config.config_file import Change

    directory = Path(f"evaluations/{_name(tasks)}-{_name(model)}").absolute()
    return Change(("output", "directory"), str(directory), "--out")


def _task_changes(tasks: str) -> list[Change]:
    from rollouts.run_config.config_file import Change

    kind = _TASK_KINDS.get(Path(tasks).suffix)
    if kind is None and ":" not in tasks:
        exit_with_error(
            f"{tasks}: pass a file of tasks ({', '.join(_TASK_KINDS)}), an import path of tasks (module:name), or a "
            "configuration file (.toml)"
        )
    table = {"kind": "import", "source": tasks} if kind is None else {"kind": kind, "path": tasks}
    return [Change(("tasks",), table, "TASKS")]


def _environment_changes(values: Mapping[str, Any]) -> list[Change]:
    """The table of the environment that --score or --environment names."""
    from rollouts.run_config.config_file import Change

    score, factory = values["score"], values["environment"]
    if score is not None and factory is not None:
        exit_with_error("--score and --environment: pass one of them; an environment rewards its episodes itself")
    table: dict[str, Any]
    if factory is not None:
        table = {"kind": "import", "factory": _absolute(factory)}
        return [Change(("environment",), table, "--environment")]
    if score is not None:
        function = _absolute(f"{score}:score" if score.endswith(".py") else score)
        reward = {"name": function.rpartition(":")[2], "function": function}
        return [Change(("environment",), {"kind": "scored_prompt", "rewards": [reward]}, "--score")]
    return []


def _absolute(import_path: str) -> str:
    """An import path whose file, if it names one, is relative to the working directory."""
    path, colon, name = import_path.rpartition(":")
    return f"{Path(path).absolute()}{colon}{name}" if path.endswith(".py") else import_path


def _name(text: str | None) -> str:
    """A part of the name of a directory."""
    last = re.sub(r"\.(jsonl|parquet|toml)$", "", Path(str(text).rpartition(":")[2].rstrip("/")).name)
    return "".join(one if one.isalnum() or one in "._-" else "-" for one in last) or "tasks"


def _of_held_out_tasks(file: ConfigFile) -> ConfigFile:
    """The configuration with the held-out tasks of a file of `rollouts train`, where it has some."""
    held_out = file.config.evaluation.tasks or file.config.tasks
    return replace(file, config=file.config.model_copy(update={"tasks": held_out}))


def _results(parts: RunParts, output: OutputDirectory, *, complete: bool) -> EvaluationResults:
    """The results of all groups in the output directory."""
    from rollouts.run_config.group_files import read_group_rows
    from rollouts.run_config.parts import make_tally

    tally = make_tally(parts.file, parts.file.config.group_size)
    for row in read_group_rows(output.metrics):
        tally.add(row.values)
    return tally.results(complete=complete, configuration=parts.description())


def _print_results(results: EvaluationResults, console: Console) -> None:
    above, below = results.sentences()
    print_line(above)
    columns = [
        Column("figure", wraps=True),
        *(Column(name, align_right=True) for name in ("value", "95 % interval", "tasks")),
    ]
    rows = [
        [
            printable_line(name),
            f"{one.value:.3f}",
            "-" if one.low is None else f"{one.low:.3f} to {one.high:.3f}",
            f"{one.tasks:,}",
        ]
        for name, one in results.estimates()
    ]
    print_table(columns, rows, console)
    print_line(below)
    for error in results.errors.values():
        print_line(f"  {error.episodes:,} x {printable_line(error.example)}")
    for warning in [*results.warnings, *([] if results.complete else ["not all tasks were evaluated"])]:
        print_warning(warning)
