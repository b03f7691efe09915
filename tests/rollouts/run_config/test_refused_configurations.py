"""Configurations that cannot be used: every error names the file or option, the key, and what is allowed."""

import json
from pathlib import Path

import pytest
from run_config_files import CONFIG, changed, run, write_run

from rollouts.run_config.config_file import Change, read_config
from rollouts.run_config.errors import ConfigProblem, RunConfigError
from rollouts.run_config.run_parts import make_parts
from rollouts.testing import tiny_qwen3_vl

ENGINE = 'kind = "scripted"\ncompletions = ["4", "7"]'
VLLM = 'kind = "vllm"\nbase_url = "http://h"'
SGLANG = 'kind = "sglang"\nbase_url = "http://h"'
IMPORTED = 'kind = "import"\nfactory = "functions_env:'
FACTORY = 'kind = "import"\nfactory = "guess_env:Guess"\narguments = { tries = 2 }'
SCORED = 'kind = "scored_prompt"\nmessages = "functions_env:messages"\n'
REWARD = '[[environment.rewards]]\nname = "a"\nfunction = "functions_env:right"\n'
TOOLS = 'kind = "tools"\nmessages = "functions_env:messages"\n'
TASKS = 'kind = "jsonl"\npath = "tasks.jsonl"\nid_key = "name"'
SOURCE = 'kind = "import"\nsource = "functions_env:'

MODULES = {
    "functions_env.py": """\
from rollouts.task import Task
LIST = [Task("a"), Task("b")]
TEXT = "a"

def messages(task):
    return []

def right(completion, task):
    return 1.0

def look(side: int):
    '''Show the square.'''

def untyped(side):
    return side

def nothing():
    return []

def count(n):
    return (Task(str(number)) for number in range(n))

def fail():
    raise OSError("the disk is gone")
""",
    "raises_env.py": "1 / 0",
    "exits_env.py": "import sys; sys.exit(0)",
    "imports_env.py": "import no_such_package",
    "config.json": "{}",  # of a local engine
}

# The text that is replaced in CONFIG, its replacement, the key of the error, and a part of the reason.
REFUSED: dict[str, tuple[str, str, str, str]] = {
    # Of the values alone.
    "unknown key": ("group_size = 2", "grup_size = 2", "grup_size", "did you mean 'group_size'?"),
    "unknown key like no other": ("seed = 3", "zzz = 3", "zzz", "the keys here are tasks, environment, engine,"),
    "unknown table": ("[limits]", "[limit]\nx = 1\n[limits]", "limit", "did you mean 'limits'?"),
    "unknown kind": ('kind = "scripted"', 'kind = "script"', "engine.kind", "did you mean 'scripted'?"),
    "no kind": ('kind = "scripted"\n', "", "engine.kind", "the kinds are vllm, sglang, fleet, openai"),
    "key of another kind": (ENGINE, ENGINE + '\nbase_url = "x"', "engine.base_url", "the keys here are kind,"),
    "unknown choice": ("[limits]", '[evaluation]\nfailed = "zer"\n[limits]', "evaluation.failed", "mean 'zero'?"),
    "key of the API": (ENGINE, ENGINE + '\napi_key = "sk-1"', "engine.api_key", "api_key_env"),
    "key in place of a variable": (ENGINE, VLLM + '\napi_key_env = "sk-1"', "engine.api_key_env", "VLLM_API_KEY"),
    "key in an address": (ENGINE, 'kind = "vllm"\nbase_url = "http://u:sk-1@h"', "engine.base_url", "api_key_env"),
    "no address": (ENGINE, 'kind = "vllm"\nbase_url = "localhost"', "engine.base_url", "http://host:8000"),
    "text for a number": ("max_turns = 4", 'max_turns = "4"', "limits.max_turns", "'4': Input should be a valid int"),
    "number too small": ("group_size = 2", "group_size = 0", "group_size", "0: Input should be greater than or equal"),
    "integer of more than 64 bits": (
        "tries = 2",
        "tries = [99999999999999999999]",
        "environment.arguments.tries",
        "99999999999999999999 is out of range",
    ),
    "null in a path": ('"out"', '"a\\u0000b"', "output.directory", "should match pattern"),
    "no import path": ("guess_env:Guess", "guess_env.Guess", "environment.factory", "module:name"),
    "missing key": ("max_tokens = 16\n", "", "sampling.max_tokens", "Field required"),
    "template variable of the renderer": (
        '"model"',
        '"model"\nchat_template_kwargs.tools = []',
        "renderer.chat_template_kwargs",
        "the renderer passes tools",
    ),
    "engine without a renderer": ('[renderer]\nmodel = "model"\n', "", "renderer", "add [renderer]"),
    "renderer beside an endpoint": (
        ENGINE,
        'kind = "openai"\nbase_url = "http://h/v1"\nmodel = "m"',
        "renderer",
        'an engine of kind "openai" renders messages itself; remove the table',
    ),
    "tasks of verifiers alone": (TASKS, 'kind = "verifiers"', "environment", 'both of kind "verifiers"'),
    "no server": (ENGINE, 'kind = "fleet"', "engine", "[[engine.servers]]"),
    "servers named by two keys": (
        ENGINE,
        'kind = "fleet"\nurls = ["http://h"]\nservers = [{ base_url = "http://i" }]',
        "engine",
        "by one of two keys",
    ),
    "one server twice": (ENGINE, 'kind = "fleet"\nurls = ["http://h:1",\n"http://h:1/"]', "engine", "named twice"),
    "option of vLLM for SGLang": (
        ENGINE,
        'kind = "fleet"\nserver_kind = "sglang"\nurls = ["http://h"]\nmedia = "features"',
        "engine",
        "media is an option for servers of vLLM",
    ),
    # Of what the values refer to.
    "no file of tasks": ("tasks.jsonl", "task.jsonl", "tasks.path", "there is no file"),
    "no module": ("guess_env:", "gues_env:", "environment.factory", "no module 'gues_env'"),
    "module that raises": ("guess_env:", "raises_env:", "environment.factory", "raised ZeroDivisionError"),
    "module that ends the program": ("guess_env:", "exits_env:", "environment.factory", "raised SystemExit"),
    "module that misses another": (
        "guess_env:",
        "imports_env:",
        "environment.factory",
        "'no_such_package', which imports_env imports",
    ),
    "no name": (":Guess", ":Gues", "environment.factory", 'did you mean "guess_env:Guess"?'),
    "no function": (":Guess", ":NUMBER", "environment.factory", "is a int; name a function or a class"),
    "unknown argument": ("tries = 2", "trie = 2", "environment.arguments", "Guess(task, trie=)"),
    "no model": ('model = "model"', 'model = "./modle"', "renderer.model", "there is no directory"),
    "no tokenizer": ('model = "model"', 'model = "."', "renderer.model", "tokenizer.json"),
    "repository outside the cache": ('"model"', '"nobody/nothing"', "renderer.model", "local cache"),
    "revision of a directory": ('"model"', '"model"\nrevision = "x"', "renderer.revision", "remove the key"),
    "no template": ('"model"', '"model"\nchat_template = "x.jinja"', "renderer.chat_template", "there is no file"),
    "no host": ('"model"', '"model"\nmedia.allowed_hosts = ["http://h"]', "renderer.media", "allowed_hosts"),
    "variable that is not set": (ENGINE, VLLM + '\napi_key_env = "NOT_SET"', "engine.api_key_env", "is not set"),
    "no model of the engine": (ENGINE, 'kind = "local"\ndirectory = "x"', "engine.directory", "config.json"),
    "argument of the engine": (
        ENGINE,
        IMPORTED + 'right"\narguments.x = 1',
        "engine.arguments",
        "takes (completion, task)",
    ),
    "reward twice": (FACTORY, SCORED + 2 * REWARD, "environment.rewards", "2 rewards have this name"),
    "reward that does not exist": (
        FACTORY,
        SCORED + REWARD.replace("right", "rigth"),
        "environment.rewards[0].function",
        'did you mean "functions_env:right"?',
    ),
    "tool without types": (
        FACTORY,
        TOOLS + 'tools = [\n"functions_env:look",\n"functions_env:untyped"]',
        "environment.tools[1]",
        "'side' has no annotation",
    ),
    "unknown id of Gymnasium": (FACTORY, 'kind = "gymnasium"\nid = "FrozenLak-v1"', "environment.id", "FrozenLake"),
    "group reward with the name of another": (
        "[limits]",
        '[[group_rewards]]\nname = "environment"\nfunction = "guess_env:Guess"\n[limits]',
        "group_rewards[0].name",
        "give the group reward another one",
    ),
    "group reward without episodes": (
        "seed = 3",
        'group_rewards = [{ name = "a", function = "functions_env:nothing" }]',
        "group_rewards[0].function",
        "it is called as nothing(episodes), but takes ()",
    ),
    "text for tasks": (TASKS, SOURCE + 'TEXT"', "tasks.source", "gives a str; give an iterable of Task"),
    "arguments of a list": (TASKS, SOURCE + 'LIST"\narguments.n = 3', "tasks.arguments", "is not called"),
    "another argument": (TASKS, SOURCE + 'count"\narguments.m = 3', "tasks.arguments", "but takes (n)"),
    "tasks that raise": (TASKS, SOURCE + 'fail"', "tasks.source", "raised OSError: the disk is gone"),
}

# Options with which the engine would refuse every request.
SAMPLING = {
    "vLLM's most": (VLLM, "temperature = 2.5", "temperature", "vLLM takes at most 2.0"),
    "stop of vLLM": (VLLM, 'extra.stop = ["x"]', "extra.stop", "use stop_token_ids"),
    "fleet": ('kind = "fleet"\nurls = ["http://h"]', "extra.min_tokens = 17", "extra.min_tokens", "max_tokens 16"),
    "local": ('kind = "local"\ndirectory = "."', "extra.min_p = 0.1", "extra.min_p", "remove it"),
    "SGLang": (SGLANG, "extra.min_tokens = 1", "extra.min_tokens", "after this change"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_vl(tmp_path_factory.mktemp("model") / "model", weights=False)


def problems_of(directory: Path, model: Path, config: str, changes: list[Change]) -> tuple[ConfigProblem, ...]:
    path = write_run(directory, config, model=False)
    (directory / "model").symlink_to(model)
    for name, content in MODULES.items():
        (directory / name).write_text(content)
    with pytest.raises(RunConfigError) as caught:
        make_parts(read_config(path, changes), offline=True)
    assert "sk-1" not in str(caught.value)
    return caught.value.problems


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_named_with_its_key_and_what_is_allowed(tmp_path: Path, model: Path, name: str) -> None:
    old, new, key, reason = REFUSED[name]
    problems = problems_of(tmp_path, model, changed(old, new), [])
    (problem,) = [one for one in problems if one.key == key]
    assert reason in problem.reason
    assert str(problem).startswith(f"{tmp_path / 'run.toml'}: {key}: ")


@pytest.mark.parametrize(
    ("function", "reason"),
    [("nothing", "gives a list; give an object of"), ("fail", "raised OSError: the disk is gone")],
)
def test_a_function_that_gives_no_engine_is_named_before_the_run(
    tmp_path: Path, model: Path, function: str, reason: str
) -> None:
    path = write_run(tmp_path, CONFIG.replace(ENGINE, f'{IMPORTED}{function}"'), model=False)
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "functions_env.py").write_text(MODULES["functions_env.py"])
    result = run(path)
    assert result.exit_code == 2
    assert f"engine.factory: functions_env:{function} {reason}" in result.output


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_option_that_the_engine_refuses_is_an_error_before_the_run(
    tmp_path: Path, model: Path, name: str
) -> None:
    engine, option, key, reason = SAMPLING[name]
    config = CONFIG.replace(ENGINE, engine).replace("temperature = 0.5", option)
    (problem,) = problems_of(tmp_path, model, config, [])
    assert problem.key == f"sampling.{key}"
    assert reason in problem.reason


def test_what_an_imported_engine_takes_is_not_checked_before_the_run(tmp_path: Path, model: Path) -> None:
    config = CONFIG.replace(ENGINE, f'{IMPORTED}nothing"').replace("temperature = 0.5", "extra.own_option = 3")
    path = write_run(tmp_path, config, model=False)
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "functions_env.py").write_text(MODULES["functions_env.py"])
    make_parts(read_config(path), offline=True)


def test_every_wrong_value_is_reported_at_once_with_the_option_that_gave_it(tmp_path: Path, model: Path) -> None:
    changes = [Change(("group_size",), 0, "--samples"), Change(("limits", "max_turns"), "x", "--set")]
    problems = problems_of(tmp_path, model, changed("seed = 3", "seed = -1"), changes)
    origins = {problem.key: problem.origin for problem in problems}
    assert origins == {"seed": str(tmp_path / "run.toml"), "group_size": "--samples", "limits.max_turns": "--set"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"group_size = 2\nseed =\n", "(at line 2, column 7)"),
        (b"seed = 3\n# caf\xe9\n", "can't decode byte 0xe9"),
        (b"seed = " + b"9" * 5000, "Exceeds the limit"),
        (b"a = " + b"[" * 100_000 + b"]" * 100_000, "recursion"),
    ],
)
def test_a_file_that_is_not_toml_is_named_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(RunConfigError) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}: not TOML: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("limits.max_turns=x", "--set: limits.max_turns: 'x': Input should be a valid integer"),
        ("limits.max_turn=1", "--set: limits.max_turn: Extra inputs are not permitted"),
        ("output=out", "--set: output: 'out': no table; write { key = value } in a file, and JSON with --set"),
        ("mode=asynchronous", "--set: mode: 'asynchronous': no table;"),
        ("environment.arguments=3", "--set: environment.arguments: 3: no table;"),
        ("seed", "--set: seed is no KEY=VALUE"),
    ],
)
def test_a_value_of_set_is_checked_as_those_of_the_file(tmp_path: Path, option: str, error: str) -> None:
    result = run(write_run(tmp_path, model=False), "--set", option)
    assert result.exit_code == 2
    assert error in result.stderr


def test_set_gives_numbers_texts_and_tables_in_place_of_those_of_the_file(tmp_path: Path) -> None:
    options = ["group_size=1", "output.directory=other", 'environment.arguments={"tries": 1}']
    result = run(write_run(tmp_path), *(text for option in options for text in ("--set", option)))
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "other/metrics.jsonl").read_text().splitlines()]
    assert [row["turns"] for row in rows] == [1, 1]
