"""Wrong configuration files: every error names the key, its line and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_config_files import changed

from rollouts.run_config.config_file import read_config
from rollouts.run_config.errors import ConfigProblem, RunConfigError


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
    "missing key": ("max_tokens = 16\n", "", "sampling.max_tokens", ["add `max_tokens = ...` to [sampling]"]),
    "missing kind": ('kind = "scripted"\n', "", "engine.kind", ['write "vllm" or "sglang" or "fleet" or "openai"']),
    "missing key of a kind": ('completions = ["4", "7"]\n', "", "engine.completions", ["add `completions = ...`"]),
    "one table for an array of tables": (
        "[limits]",
        '[group_rewards]\nname = "short"\n[limits]',
        "group_rewards",
        ["is no such table; write [[group_rewards]] and its keys below it"],
    ),
    "missing array of tables": (
        'kind = "import"\nfactory = "guess_env:Guess"\narguments = { tries = 2 }',
        'kind = "scored_prompt"\nmessages = "guess_env:messages"',
        "environment.rewards",
        ["the table is missing; add [[environment.rewards]]"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_named_with_its_key_and_the_cure(path: Path, name: str) -> None:
    old, new, key, reasons = WRONG[name]
    text, _ = changed(old, new)
    (problem,) = [one for one in problems_of(path, text) if one.key == key]
    for reason in reasons:
        assert reason in problem.reason
    assert problem.text(path).startswith(f"{path}: {key}: ")
    assert "sk-secret" not in problem.text(path)


@pytest.mark.parametrize("new", ["seed =", "seed = True", "seed: 3", "seed = 3\nseed = 4"])
def test_a_syntax_error_is_named_with_its_line(path: Path, new: str) -> None:
    text, line = changed("seed = 3", new)
    (problem,) = problems_of(path, text)
    assert problem.reason.startswith("not TOML: ")
    assert f"(at line {line}, column " in problem.reason


def test_a_file_of_another_encoding_is_named_with_the_line_of_its_first_foreign_byte(path: Path) -> None:
    (problem,) = problems_of(path, b"seed = 3\n# caf\xe9\n")
    assert problem.reason.startswith("line 2: ")
    assert "0xe9" in problem.reason
    assert "UTF-8" in problem.reason


@pytest.mark.parametrize("digits", ["9" * 5000, "9_9" * 2500])
def test_an_integer_of_thousands_of_digits_is_named_with_its_line(path: Path, digits: str) -> None:
    text, line = changed("seed = 3", f"seed = {digits}")
    (problem,) = problems_of(path, text)
    assert problem.reason.startswith(f"line {line}: an integer of too many digits; write one from -")


def test_arrays_nested_too_deep_are_an_error(path: Path) -> None:
    (problem,) = problems_of(path, "a = " + "[" * 100_000 + "]" * 100_000)
    assert "nested too deep" in problem.reason
