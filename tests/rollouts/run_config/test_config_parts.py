"""What a configuration refers to: files, modules, environment variables. Errors name key and cure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_config_files import CONFIG, changed, write_run

from rollouts.cli.run.run_parts import RunParts, make_parts
from rollouts.run_config.config_file import read_config
from rollouts.run_config.errors import ConfigProblem, RunConfigError, TaskFileError
from rollouts.run_config.tasks import FileTaskSource
from rollouts.task import Task


def parts_of(directory: Path, config: str = CONFIG) -> RunParts:
    return make_parts(read_config(write_run(directory, config)), offline=True)


def problem_of(directory: Path, config: str) -> ConfigProblem:
    with pytest.raises(RunConfigError) as caught:
        parts_of(directory, config)
    (problem,) = caught.value.problems
    return problem


def test_a_group_reward_whose_name_the_rewards_of_the_episodes_have_is_refused_with_its_line(tmp_path: Path) -> None:
    reward = '[[group_rewards]]\nname = "environment"\nfunction = "guess_env:Guess"\n'
    problem = problem_of(tmp_path, CONFIG + reward)
    assert problem.key == "group_rewards[0].name"
    assert "give the group reward another one" in problem.reason


ENGINE = 'kind = "scripted"\ncompletions = ["4", "7"]'

WRONG: dict[str, tuple[str, str, str, list[str]]] = {
    "no file of tasks": ("tasks.jsonl", "task.jsonl", "tasks.path", ["there is no file", "task.jsonl", "relative to"]),
    "no module": (
        "guess_env:",
        "gues_env:",
        "environment.factory",
        ["no module 'gues_env'", "correct the name, or install the package"],
    ),
    "no name": (":Guess", ":Gues", "environment.factory", ["has no 'Gues'", 'did you mean "guess_env:Guess"?']),
    "no function": (":Guess", ":NUMBER", "environment.factory", ["is a int", "name a function or a class"]),
    "unknown argument": ("tries = 2", "trie = 2", "environment.arguments", ["trie", "Guess(task, trie=)"]),
    "no model": ('model = "model"', 'model = "./modle"', "renderer.model", ["there is no directory", "modle"]),
    "no tokenizer": ('model = "model"', 'model = "."', "renderer.model", ["tokenizer.json"]),
    "repository that is not in the cache": (
        '"model"',
        '"nobody/nothing"',
        "renderer.model",
        ["local cache", "--dry-run"],
    ),
    "revision of a directory": ('"model"', '"model"\nrevision = "x"', "renderer.revision", ["remove the key"]),
    "no template": ('"model"', '"model"\nchat_template = "x.jinja"', "renderer.chat_template", ["there is no file"]),
    "template variable of the renderer": (
        '"model"',
        '"model"\nchat_template_kwargs.tools = []',
        "renderer.chat_template_kwargs.tools",
        ["the renderer passes", "remove the key"],
    ),
    "no host": (
        '"model"',
        '"model"\nmedia.allowed_hosts = ["http://h"]',
        "renderer.media",
        ["allowed_hosts", "example.org"],
    ),
    "no address": (ENGINE, 'kind = "vllm"\nbase_url = "localhost"', "engine.base_url", ["http://host:8000"]),
    "key in the address": (ENGINE, 'kind = "vllm"\nbase_url = "http://u:sk-1@h"', "engine.base_url", ["api_key_env"]),
    "variable that is not set": (
        ENGINE,
        'kind = "vllm"\nbase_url = "http://h"\napi_key_env = "NOT_SET_HERE"',
        "engine.api_key_env",
        ["is not set", "put the server's key in it"],
    ),
    "no server": (ENGINE, 'kind = "fleet"', "engine.kind", ["no server is named", "[[engine.servers]]"]),
    "servers named twice": (
        ENGINE,
        'kind = "fleet"\nurls = ["http://h"]\nservers = [{ base_url = "http://i" }]',
        "engine.servers",
        ["the servers are named by `urls` too", "remove one"],
    ),
    "one server twice": (
        ENGINE,
        'kind = "fleet"\nurls = ["http://h:1",\n"http://h:1/"]',
        "engine.urls[1]",
        ["named twice"],
    ),
    "an option of vLLM for SGLang": (
        ENGINE,
        'kind = "fleet"\nserver_kind = "sglang"\nurls = ["http://h"]\nmedia = "features"',
        "engine.media",
        ["for servers of vLLM"],
    ),
    "no model of the engine": (ENGINE, 'kind = "local"\ndirectory = "x"', "engine.directory", ["no", "config.json"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_exist_is_named_with_its_key_and_the_cure(tmp_path: Path, name: str) -> None:
    old, new, key, reasons = WRONG[name]
    text, _ = changed(old, new)
    problem = problem_of(tmp_path, text)
    assert problem.key == key
    for reason in reasons:
        assert reason in problem.reason
    assert "sk-1" not in problem.reason


@pytest.mark.parametrize(
    ("engine", "options", "key", "reason"),
    [
        ('kind = "vllm"\nbase_url = "http://h"', "temperature = 2.5", "temperature", "vLLM takes at most 2.0"),
        ('kind = "vllm"\nbase_url = "http://h"', 'extra.stop = ["x"]', "extra.stop", "use stop_token_ids"),
        ('kind = "fleet"\nurls = ["http://h"]', "extra.min_tokens = 17", "extra.min_tokens", "max_tokens 16"),
        ('kind = "local"\ndirectory = "."', "extra.min_p = 0.1", "extra.min_p", "remove it"),
        ('kind = "sglang"\nbase_url = "http://h"', "extra.min_tokens = 1", "extra.min_tokens", "after this change"),
    ],
)
def test_an_option_with_which_the_engine_would_refuse_every_request_is_an_error_before_the_run(
    tmp_path: Path, engine: str, options: str, key: str, reason: str
) -> None:
    (tmp_path / "config.json").touch()  # of a local model
    config = CONFIG.replace(ENGINE, engine).replace("temperature = 0.5", options)
    problem = problem_of(tmp_path, config)
    assert problem.key == f"sampling.{key}"
    assert reason in problem.reason


@pytest.mark.parametrize(
    ("key", "addition", "reason"),
    [
        ("skip_group", 'skip_group = "some_env:nothing"', "it is called as nothing(group), but takes ()"),
        ("skip_group", 'skip_group = "some_env:nothin"', 'did you mean "some_env:nothing"?'),
        (
            "group_rewards[0].function",
            'group_rewards = [{ name = "a", function = "some_env:nothing" }]',
            "it is called as nothing(episodes), but takes ()",
        ),
    ],
)
def test_functions_of_groups_are_checked_before_the_run(tmp_path: Path, key: str, addition: str, reason: str) -> None:
    (tmp_path / "some_env.py").write_text("def nothing():\n    return 1\n")
    problem = problem_of(tmp_path, CONFIG.replace("seed = 3", addition))
    assert problem.key == key
    assert reason in problem.reason


MODULES = {
    "raises": ("1 / 0", "raised ZeroDivisionError", "mend the module"),
    "does not parse": ("def", "raised SyntaxError", "mend the module"),
    "ends the program": ("import sys; sys.exit(0)", "raised SystemExit", "mend the module"),
    "imports what is not installed": (
        "import no_such_package",
        "'no_such_package', which is not installed",
        "install it",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_cannot_be_imported_is_named_with_the_reason(tmp_path: Path, name: str) -> None:
    code, reason, cure = MODULES[name]
    path = write_run(tmp_path, CONFIG.replace("guess_env:Guess", "broken_env:Guess"))
    (tmp_path / "broken_env.py").write_text(code)
    with pytest.raises(RunConfigError, match=reason) as caught:
        make_parts(read_config(path), offline=True)
    assert caught.value.problems[0].key == "environment.factory"
    assert cure in caught.value.problems[0].reason


# Tasks.


def with_tasks(lines: str) -> str:
    section = '[tasks]\nkind = "jsonl"\npath = "tasks.jsonl"\nid_key = "name"\n'
    assert section in CONFIG
    return CONFIG.replace(section, f"[tasks]\n{lines}\n")


@pytest.mark.parametrize("kind", ["jsonl", "toml", "parquet"])
def test_files_of_each_kind_give_the_same_tasks_each_time_they_are_read(tmp_path: Path, kind: str) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"name": "four", "number": 4, "image": b"\x89P"}, {"name": "seven", "number": 7, "image": None}]
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    else:
        rows = [{"name": "four", "number": 4}, {"name": "seven", "number": 7}]
        text = '[[tasks]]\nname = "four"\nnumber = 4\n[[tasks]]\nname = "seven"\nnumber = 7\n'
        (tmp_path / "rows.toml").write_text(text)
        (tmp_path / "rows.jsonl").write_text('{"name": "four", "number": 4}\n\n{"name": "seven", "number": 7}')
    source = parts_of(tmp_path, with_tasks(f'kind = "{kind}"\npath = "rows.{kind}"\nid_key = "name"')).tasks
    for _ in range(2):
        assert [(task.task_id, task.data) for task in source] == [("four", rows[0]), ("seven", rows[1])]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ('id_key = "name"', "row 3: has the id of row 1, 'four'"),
        ('id_key = "names"', "row 1: has no 'names'"),
        ('id_key = "image"', "row 1: image is b'"),
        ('seed_key = "number"', None),
        ('seed_key = "name"', "row 1: "),
        ("", None),
    ],
)
def test_the_ids_and_seeds_of_a_parquet_file_are_checked(tmp_path: Path, keys: str, reason: str | None) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"name": name, "number": 4, "image": b"\x89P"} for name in ("four", "seven", "four")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    source = parts_of(tmp_path, with_tasks(f'kind = "parquet"\npath = "rows.parquet"\n{keys}')).tasks
    assert isinstance(source, FileTaskSource)
    if reason is None:
        source.check()
    else:
        with pytest.raises(TaskFileError, match=re.escape(reason)):
            source.check()


ROWS = {
    "no JSON": ("{'a': 1}", "line 2: not JSON", "write one JSON object a line"),
    "incomplete JSON": ('{"a": 1', "line 2: not JSON", "column 8"),
    "no object": ("[1]", "line 2: holds [1]", "write an object"),
    "no id": ('{"a": 1}', "line 2: has no 'name'", "add it, or remove tasks.id_key"),
    "id of another type": ('{"name": 1.5}', "line 2: name is 1.5", "write a text or an integer"),
    "half of a surrogate pair": ('{"name": "\\ud800"}', "line 2: it has half of a surrogate pair", "whole character"),
    "empty id": ('{"name": ""}', "line 2: task_id is ''", "not empty"),
    "Latin-1": ('{"name": "caf\udce9"}', "line 2: is not UTF-8 text", "save the file as UTF-8"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_wrong_row_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    row, place, cure = ROWS[name]
    text = f'{{"name": "a", "number": 1}}\n{row}\n'
    (tmp_path / "wrong.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    parts = parts_of(tmp_path, CONFIG.replace("tasks.jsonl", "wrong.jsonl"))
    iterator = iter(parts.tasks)
    assert next(iterator).task_id == "a"
    with pytest.raises(TaskFileError) as caught:
        next(iterator)
    assert place in str(caught.value)
    assert cure in str(caught.value)
    assert caught.value.row == 2


@pytest.mark.parametrize(
    ("kind", "content", "reason"),
    [
        ("toml", b"x = 1", r"begin each task with \[\[tasks\]\]"),
        ("toml", b"x", "not TOML"),
        ("toml", b"x = " + b"9" * 5000, "not TOML: Exceeds the limit"),
        ("parquet", b"nothing", "cannot be read as Parquet"),
        ("jsonl", b'{"name": "caf\xe9"}', "is not UTF-8"),
    ],
)
def test_a_file_that_holds_no_tasks_is_an_error(tmp_path: Path, kind: str, content: bytes, reason: str) -> None:
    (tmp_path / f"rows.{kind}").write_bytes(content)
    parts = parts_of(tmp_path, with_tasks(f'kind = "{kind}"\npath = "rows.{kind}"'))
    with pytest.raises(TaskFileError, match=reason):
        list(parts.tasks)


IMPORTED = """\
from rollouts.task import Task
LIST = [Task("a"), Task("b")]
TEXT = "a"
def count(n):
    return (Task(str(number)) for number in range(n))
def fail():
    raise OSError("the disk is gone")
"""


def imported(directory: Path, source: str, arguments: str = "") -> str:
    (directory / "some_tasks.py").write_text(IMPORTED)
    return with_tasks(f'kind = "import"\nsource = "some_tasks:{source}"\n{arguments}')


def test_tasks_are_imported_as_an_iterable_or_from_a_function(tmp_path: Path) -> None:
    assert [task.task_id for task in parts_of(tmp_path, imported(tmp_path, "LIST")).tasks] == ["a", "b"]
    counted = parts_of(tmp_path, imported(tmp_path, "count", "arguments = { n = 3 }"))
    assert list(counted.tasks) == [Task("0"), Task("1"), Task("2")]


@pytest.mark.parametrize(
    ("source", "arguments", "key", "reason"),
    [
        ("TEXT", "", "tasks.source", "gives a str; give an iterable of Task"),
        ("LIST", "arguments = { n = 3 }", "tasks.arguments", "is not called; remove the arguments"),
        ("count", "", "tasks.source", "missing a required argument: 'n'"),
        ("count", "arguments = { m = 3 }", "tasks.arguments", "but takes (n)"),
        ("fail", "", "tasks.source", "raised OSError: the disk is gone"),
    ],
)
def test_a_source_that_gives_no_tasks_is_named(
    tmp_path: Path, source: str, arguments: str, key: str, reason: str
) -> None:
    problem = problem_of(tmp_path, imported(tmp_path, source, arguments))
    assert problem.key == key
    assert reason in problem.reason
