"""Wrong configuration files: every error names the key, its line and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_config_files import CONFIG, changed

from rollouts.run_config.config_file import ConfigProblem, RunConfigError, read_config


def problems_of(path: Path, text: str | bytes) -> tuple[ConfigProblem, ...]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RunConfigError) as caught:
        read_config(path)
    return caught.value.problems


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


# The text that is replaced, its replacement, the key of the error, and texts of the reason.
WRONG: dict[str, tuple[str, str, str, list[str]]] = {
    "unknown key at the top": ("group_size = 2", "grup_size = 2", "grup_size", ["did you mean `group_size`?"]),
    "unknown key that resembles nothing": ("seed = 3", "zzz = 3", "zzz", ["no such key", "tasks", "output"]),
    "unknown table": ("[limits]", "[limit]\nx = 1\n[limits]", "limit", ["did you mean `limits`?"]),
    "unknown kind": ('kind = "scripted"', 'kind = "script"', "engine.kind", ['did you mean "scripted"?', '"vllm"']),
    "key of another kind": (
        'completions = ["4", "7"]',
        'completions = ["4"]\nbase_url = "x"',
        "engine.base_url",
        ["[engine]"],
    ),
    "key of the API": (
        'completions = ["4", "7"]',
        'completions = ["4"]\napi_key = "x"',
        "engine.api_key",
        ["api_key_env"],
    ),
    "text for a number": (
        "max_turns = 4",
        'max_turns = "4"',
        "limits.max_turns",
        ["'4': Input should be a valid integer"],
    ),
    "number in an array": (
        'completions = ["4", "7"]',
        'completions = ["4",\n7]',
        "engine.completions[1]",
        ["7: Input should be a valid string"],
    ),
    "array for a table": (
        '[output]\ndirectory = "out"',
        '[[output]]\ndirectory = "out"',
        "output",
        ["write [output] and"],
    ),
    "number too small": (
        "group_size = 2",
        "group_size = 0",
        "group_size",
        ["0: Input should be greater than or equal to 1"],
    ),
    "integer of more than 64 bits": (
        "tries = 2",
        "tries = 99999999999999999999",
        "environment.arguments.tries",
        ["range"],
    ),
    "null in a path": ('"out"', '"a\\u0000b"', "output.directory", ["null character", "remove it"]),
    "no import path": (
        'factory = "guess_env:Guess"',
        'factory = "guess_env.Guess"',
        "environment.factory",
        ["module:name"],
    ),
    "no name of a variable": (
        'kind = "scripted"\ncompletions = ["4", "7"]',
        'kind = "vllm"\nbase_url = "http://h"\napi_key_env = "sk-secret"',
        "engine.api_key_env",
        ["VLLM_API_KEY"],
    ),
}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "[limits]",
            '[group_rewards]\nname = "short"\n[limits]',
            "group_rewards: {'name': 'short'} is no such table; write [[group_rewards]] and its keys below it",
        ),
        (
            'kind = "import"\nfactory = "guess_env:Guess"\narguments = { tries = 2 }',
            'kind = "scored_prompt"\nmessages = "guess_env:messages"',
            "environment.rewards: the table is missing; add [[environment.rewards]]",
        ),
        (
            'kind = "import"\nfactory = "guess_env:Guess"\narguments = { tries = 2 }',
            'kind = "scored_prompt"\nmessages = "guess_env:messages"\nrewards = []',
            "environment.rewards: [] is no such table; write [[environment.rewards]] and its keys below it",
        ),
    ],
    ids=["one table", "missing", "empty"],
)
def test_an_array_of_tables_is_named_with_the_header_that_begins_each(
    path: Path, old: str, new: str, problem: str
) -> None:
    assert [f"{one.key}: {one.reason}" for one in problems_of(path, CONFIG.replace(old, new))] == [problem]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_named_with_its_key_and_the_cure(path: Path, name: str) -> None:
    old, new, key, reasons = WRONG[name]
    text, _ = changed(old, new)
    (problem,) = [one for one in problems_of(path, text) if one.key == key]
    for reason in reasons:
        assert reason in problem.reason
    assert problem.text(path).startswith(f"{path}: {key}: ")


MISSING = {
    "a key": ("max_tokens = 16\n", "sampling.max_tokens", "add `max_tokens = ...` to [sampling]"),
    "a kind": (
        'kind = "scripted"\n',
        "engine.kind",
        'write "vllm" or "sglang" or "fleet" or "openai" or "local" or "scripted"',
    ),
    "a key of a kind": ('completions = ["4", "7"]\n', "engine.completions", "add `completions = ...`"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_key_is_named_with_its_table(path: Path, name: str) -> None:
    removed, key, reason = MISSING[name]
    (problem,) = problems_of(path, CONFIG.replace(removed, ""))
    assert problem.key == key
    assert reason in problem.reason


def test_every_problem_of_a_file_is_reported(path: Path) -> None:
    text = CONFIG.replace("seed = 3", "seed = -3").replace("max_tokens = 16", "max_tokens = 0").replace('"out"', "1")
    assert {problem.key for problem in problems_of(path, text)} == {"seed", "sampling.max_tokens", "output.directory"}


SYNTAX = {
    "no value": ("seed = 3", "seed =", "remove the key"),
    "no quotes": ('model = "model"', "model = model/dir", "write text in quotes"),
    "True": ("seed = 3", "seed = True", "write true"),
    "colon": ("seed = 3", "seed: 3", "`key = value`"),
    "twice": ("seed = 3", "seed = 3\nseed = 4", "overwrite"),
    "table twice": ("[limits]", "[limits]\n[sampling]", "not TOML"),
}


@pytest.mark.parametrize("name", SYNTAX)
def test_a_syntax_error_is_named_with_its_line_and_the_cure(path: Path, name: str) -> None:
    old, new, reason = SYNTAX[name]
    text, line = changed(old, new)
    (problem,) = problems_of(path, text)
    assert problem.reason.startswith("not TOML: ")
    assert f"(at line {line}, column " in problem.reason
    assert reason in problem.reason


def test_a_file_of_another_encoding_is_named_with_the_line_of_its_first_foreign_byte(path: Path) -> None:
    (problem,) = problems_of(path, b"seed = 3\n# caf\xe9\n")
    assert problem.reason.startswith("line 2: ")
    assert "0xe9" in problem.reason
    assert "UTF-8" in problem.reason


def test_arrays_nested_too_deep_are_an_error(path: Path) -> None:
    (problem,) = problems_of(path, "a = " + "[" * 100_000 + "]" * 100_000)
    assert "nested too deep" in problem.reason


@pytest.mark.parametrize("line", ['api_key = "sk-secret"', 'api_key_env = "sk-secret"', 'token = "sk-secret"'])
def test_a_secret_in_the_file_is_not_repeated_in_the_error(path: Path, line: str) -> None:
    old = 'kind = "scripted"\ncompletions = ["4", "7"]'
    text, _ = changed(old, f'kind = "vllm"\nbase_url = "http://h"\n{line}')
    (problem,) = problems_of(path, text)
    assert "sk-secret" not in problem.text(path)
