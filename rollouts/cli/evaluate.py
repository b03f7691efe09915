"""`rollouts eval`: evaluate a model on tasks, with the episodes of `rollouts run` and statistics over them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from rollouts.cli.run.command import RerunFailed, check_rerun, checked_parts, exit_on_problems, run_and_report
from rollouts.errors import ArgumentError
from rollouts.terminal.table import Column, print_table
from rollouts.terminal.text import exit_with_error, print_line, print_note, print_warning, printable_line

if TYPE_CHECKING:
    from rollouts.cli.run.output import OutputDirectory
    from rollouts.cli.run.run_parts import RunParts
    from rollouts.evaluation.results import EvaluationResults
    from rollouts.run_config.config_file import ConfigFile
    from rollouts.run_config.errors import KeyPath

#: Of an evaluation without a configuration file. Fewer tokens cut the answers of models that reason.
_MAX_TOKENS: Final = 2048

#: The groups of the options in the help.
_MODEL: Final = "Model"
_TASKS: Final = "Tasks and environment"
_SAMPLING: Final = "Sampling"
_STATISTICS: Final = "Statistics"


class ServerName(StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"


_TASK_KINDS: Final = {".jsonl": "jsonl", ".parquet": "parquet"}

#: The keys of a configuration file that options replace.
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "--samples": ("group_size",),
    "--seed": ("seed",),
    "--concurrency": ("concurrency",),
    "--max-tokens": ("sampling", "max_tokens"),
    "--temperature": ("sampling", "temperature"),
    "--threshold": ("evaluation", "threshold"),
    "--failed": ("evaluation", "failed"),
    "--k": ("evaluation", "k"),
    "--out": ("output", "directory"),
    "--api-key-env": ("engine", "api_key_env"),
    "--id-key": ("tasks", "id_key"),
    "--messages": ("environment", "messages"),
}

#: The options that gave the values of other keys, for errors of a call without a configuration file.
_OPTIONS: Final[Mapping[str, str]] = {
    **{".".join(key): option for option, key in _KEYS.items()},
    "environment.rewards[0].function": "--score",
    "environment.factory": "--environment",
    "tasks.path": "TASKS",
    "tasks.source": "TASKS",
    "engine": "--openai-base-url",
    "engine.base_url": "--base-url or --openai-base-url",
    "engine.urls": "--base-url",
    "engine.directory": "--model",
    "engine.model": "--model",
    "renderer.model": "--model",
    "environment.arguments": "--argument",
    "sampling.extra": "--sampling",
}


def evaluate(
    tasks: Annotated[
        str,
        typer.Argument(
            metavar="TASKS|CONFIG",
            help="A file of tasks (.jsonl, .parquet), an import path of tasks (module:name), or a configuration file "
            "of `rollouts run` (.toml).",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model directory, run in this process; with --base-url the model that the server serves, a "
            "directory or repository; with --openai-base-url the name that the endpoint has for it. Of a CONFIG, it "
            "replaces the model.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="A server of vLLM or SGLang; several times for a fleet.", rich_help_panel=_MODEL
        ),
    ] = None,
    engine: Annotated[
        ServerName | None, typer.Option(help="What serves at --base-url; default: vllm.", rich_help_panel=_MODEL)
    ] = None,
    openai_base_url: Annotated[
        str | None,
        typer.Option(
            "--openai-base-url",
            metavar="URL",
            help="An endpoint with OpenAI's chat completions.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The environment variable with the key of server or endpoint.", rich_help_panel=_MODEL
        ),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="score(completion, task) of a file or module, for one answer to each task.",
            rich_help_panel=_TASKS,
        ),
    ] = None,
    messages: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="messages(task), the prompt; default: `messages`, `prompt` or `question` of the task's row.",
            rich_help_panel=_TASKS,
        ),
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME",
            help="A class or function that is called with a task for each episode.",
            rich_help_panel=_TASKS,
        ),
    ] = None,
    id_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="The key of a row with the task's id; default: its number.", rich_help_panel=_TASKS
        ),
    ] = None,
    argument: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An argument of --environment; several times.", rich_help_panel=_TASKS),
    ] = None,
    media_dir: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="A directory from which messages may name images and sounds; several times.",
            rich_help_panel=_TASKS,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", "-n", min=1, metavar="N", help="Episodes of each task; default: 1.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option(
            "--k",
            min=1,
            metavar="K",
            help="Of pass@K and pass^K; several times. Default: powers of 2.",
            rich_help_panel=_STATISTICS,
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="REWARD",
            help="An episode succeeds with at least this total reward; default: 1.",
            rich_help_panel=_STATISTICS,
        ),
    ] = None,
    failed: Annotated[
        str | None,
        typer.Option(
            metavar="zero|exclude",
            help="How episodes with an error count: as 0 (default), or not at all.",
            rich_help_panel=_STATISTICS,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help=f"Tokens of an answer; default: {_MAX_TOKENS:,}.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="T", help="Temperature of the sampling; default: 1.", rich_help_panel=_SAMPLING),
    ] = None,
    sampling: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="A further sampling option, such as top_p=0.9, or one under the engine's own name; several times.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Of environments and sampling.", rich_help_panel=_SAMPLING)
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Episodes at a time; default: 64.", rich_help_panel=_SAMPLING)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the first N tasks.", rich_help_panel=_TASKS)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The output directory; default: that of CONFIG, or evaluations/TASKS-MODEL.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue in the output directory where the evaluation stopped."),
    ] = False,
    rerun_failed: RerunFailed = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything and print the first prompt; start no engine, write nothing.",
        ),
    ] = False,
) -> None:
    """Evaluate a model on tasks: rewards, pass@k and pass^k with 95 % intervals clustered by task.

    Writes results.json, the trajectories and a report to the output directory, and prints one table.
    """
    from rollouts.cli.run.output import prepare_output
    from rollouts.run_config.config_file import checked_config, read_config

    check_rerun(rerun_failed, resume=resume, limit=limit)
    if engine is not None and not base_url:
        exit_with_error("--engine: it says what serves at --base-url; pass that too")
    options: dict[str, Any] = {
        "--model": str(Path(model).absolute()) if model is not None and Path(model).is_dir() else model,
        "--base-url": base_url or None,
        "--engine": engine,
        "--openai-base-url": openai_base_url,
        "--api-key-env": api_key_env,
        "--score": None if score is None else _absolute(score),
        "--messages": None if messages is None else _absolute(messages),
        "--environment": None if environment is None else _absolute(environment),
        "--argument": _pairs("--argument", argument),
        "--media-dir": [str(directory.absolute()) for directory in media_dir or ()],
        "--sampling": _pairs("--sampling", sampling),
        "--id-key": id_key,
        "--samples": samples,
        "--seed": seed,
        "--concurrency": concurrency,
        "--max-tokens": max_tokens,
        "--temperature": temperature,
        "--threshold": threshold,
        "--failed": failed,
        "--k": k or None,
        "--out": None if out is None else str(out.absolute()),
    }
    of_file = Path(tasks).suffix == ".toml"
    with exit_on_problems({} if of_file else _OPTIONS):
        if of_file:
            path = Path(tasks)
            file = read_config(path, _changes(options, kind=read_config(path).config.engine.kind))
        else:
            values = _configuration(tasks, options)
            file = checked_config(Path("options"), values, _changes(options, kind=values["engine"]["kind"]))
        _check_k(file)
        file = _with_all_groups(file)
        parts = checked_parts(file, limit=limit, resume=resume, dry_run=dry_run)
        if dry_run:
            return
        output = prepare_output(file, resume=resume)

        def show(summary: Mapping[str, Any]) -> None:
            results = _results(parts, output, complete=summary["complete"])
            results.write(output.results)
            _print_results(results, Console())
            print_line(f"in {output.path}: results.json, trajectories.mmr, metrics.jsonl, summary.json")

        continuing = shlex.join(["rollouts", *sys.argv[1:], *([] if resume else ["--resume"])])
        run_and_report(parts, output, limit, None, continuing, show, rerun_failed=rerun_failed)


def _configuration(tasks: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration file for tasks and the options that take the place of its tables."""
    if (options["--score"] is None) == (options["--environment"] is None):
        exit_with_error("pass either --score FILE.py:FUNCTION, which scores an answer, or --environment FILE.py:NAME")
    return {
        "tasks": _tasks(tasks, options["--id-key"]),
        "environment": _environment(options),
        **_engine(options),
        "sampling": {"max_tokens": _MAX_TOKENS},
        "output": {"directory": f"evaluations/{_name(tasks)}-{_name(options['--model'])}"},
    }


def _changes(options: Mapping[str, Any], *, kind: str) -> dict[KeyPath, Any]:
    """What the options change in a configuration with an engine of this kind, by key."""
    changes: dict[KeyPath, Any] = {}
    model = options["--model"]
    if options["--base-url"] or options["--openai-base-url"]:
        tables = _engine(options)
        changes |= {("engine",): tables["engine"], ("renderer",): tables.get("renderer")}
        kind = tables["engine"]["kind"]
    elif model is not None and kind == "openai":
        changes["engine", "model"] = model
    elif model is not None:
        changes["renderer", "model"] = model
        if kind == "local":
            changes["engine", "directory"] = model
    if options["--score"] or options["--environment"]:
        changes["environment",] = _environment(options)
    changes |= {key: options[option] for option, key in _KEYS.items() if options[option] is not None}
    for name, value in options["--argument"].items():
        changes["environment", "arguments", name] = value
    for name, value in options["--sampling"].items():
        own = name in ("top_p", "top_k", "top_logprobs", "max_tokens", "temperature")
        changes[("sampling", name) if own else ("sampling", "extra", name)] = value
    if options["--media-dir"]:
        table = "engine" if kind == "openai" else "renderer"
        changes[table, "media", "allowed_directories"] = options["--media-dir"]
    return changes


def _pairs(option: str, texts: list[str] | None) -> dict[str, Any]:
    """The values of `KEY=VALUE`: JSON, and text where it is none."""
    pairs = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            exit_with_error(f"{option}: {text} is no KEY=VALUE")
        try:
            pairs[name] = json.loads(value)
        except ValueError:
            pairs[name] = value
    return pairs


def _absolute(import_path: str) -> str:
    """An import path whose file, if it names one, is relative to the working directory."""
    path, colon, name = import_path.rpartition(":")
    if import_path.endswith(".py"):  # of --score, whose function is then `score`
        path, colon, name = import_path, ":", "score"
    return f"{Path(path).absolute()}{colon}{name}" if path.endswith(".py") else import_path


def _tasks(tasks: str, id_key: str | None) -> dict[str, Any]:
    kind = _TASK_KINDS.get(Path(tasks).suffix)
    if kind is not None:
        return {"kind": kind, "path": tasks, **({} if id_key is None else {"id_key": id_key})}
    if ":" not in tasks:
        exit_with_error(
            f"{tasks}: pass a file of tasks ({', '.join(_TASK_KINDS)}), an import path of tasks (module:name), or a "
            "configuration file (.toml)"
        )
    if id_key is not None:
        exit_with_error("--id-key: tasks that are imported have their ids; leave it out")
    return {"kind": "import", "source": tasks}


def _environment(options: Mapping[str, Any]) -> dict[str, Any]:
    """The table of the environment that --score or --environment names."""
    score, factory = options["--score"], options["--environment"]
    if factory is not None:
        if options["--messages"] is not None:
            exit_with_error("--messages: an environment of --environment has its own; leave it out")
        return {"kind": "import", "factory": factory}
    return {"kind": "scored_prompt", "rewards": [{"name": score.rpartition(":")[2], "function": score}]}


def _engine(options: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of engine and renderer."""
    model, urls, endpoint = options["--model"], options["--base-url"], options["--openai-base-url"]
    key = {} if options["--api-key-env"] is None else {"api_key_env": options["--api-key-env"]}
    if model is None:
        exit_with_error("--model: pass the model directory, or the name of the model at a server")
    if urls and endpoint:
        exit_with_error("--base-url and --openai-base-url: pass one of them, a server or an endpoint")
    if endpoint:
        return {"engine": {"kind": "openai", "base_url": endpoint, "model": model, **key}}
    renderer = {"model": model}
    if not urls:
        if key:
            exit_with_error("--api-key-env: a model in this process has no key; leave it out, or pass --base-url")
        return {"engine": {"kind": "local", "directory": model}, "renderer": renderer}
    server = str(options["--engine"] or "vllm")
    if len(urls) == 1:
        servers = {"kind": server, "base_url": urls[0]}
    else:
        servers = {"kind": "fleet", "server_kind": server, "urls": urls}
    return {"engine": {**servers, **key}, "renderer": renderer}


def _name(text: str | None) -> str:
    """A part of the name of a directory."""
    last = Path(str(text).rpartition(":")[2].rstrip("/")).name.removesuffix(".jsonl").removesuffix(".parquet")
    return "".join(one if one.isalnum() or one in "._-" else "-" for one in last) or "tasks"


def _check_k(file: ConfigFile) -> None:
    from rollouts.evaluation.task_scores import chosen_k

    try:
        chosen_k(file.config.group_size, file.config.evaluation.k)
    except ArgumentError as error:
        raise file.error(("evaluation", "k"), str(error)) from error


def _with_all_groups(file: ConfigFile) -> ConfigFile:
    """The configuration without what leaves groups out: a run that trains does not need them, an evaluation does."""
    leaving_out = {name: None for name in ("skip_group", "mode") if getattr(file.config, name) is not None}
    if leaving_out:
        print_note(f"every group counts: {' and '.join(leaving_out)} of {file.path} are not used")
    return replace(file, config=file.config.model_copy(update=leaving_out))


def _results(parts: RunParts, output: OutputDirectory, *, complete: bool) -> EvaluationResults:
    """The results of all groups in the output directory."""
    from rollouts.cli.run.group_files import read_group_rows
    from rollouts.evaluation.tally import Tally

    config = parts.file.config
    counting = config.evaluation
    tally = Tally(samples=config.group_size, threshold=counting.threshold, failed=counting.failed, k=counting.k)
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
