"""Bad input, and output that cannot be written: no traceback, an exit code, and a line that names the path."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from trajectory_files import file_of, forked, short

from rollouts.terminal.text import printable
from rollouts.view import write_html

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes and devices of POSIX")
MOST_SECONDS = 300

# Runs many commands and prints the result of each, in a process of its own: one that hangs can be killed.
DRIVER = """
import json, sys
from click.testing import CliRunner
from typer.main import get_command
from rollouts.cli.main import app
command, runner = get_command(app), CliRunner()
for arguments in json.load(open(sys.argv[1])):
    result = runner.invoke(command, arguments)
    kind = None if result.exception is None else type(result.exception).__name__
    print(json.dumps([result.exit_code, result.stdout, result.stderr, kind]), flush=True)
"""

# BAD stands for the bad input, GOOD for a valid file; CONVERSATION, MODEL and OUT for a file and two directories.
COMMANDS = {
    "traj ls": "traj ls BAD",
    "traj ls --json": "traj ls BAD --json",
    "traj show": "traj show BAD",
    "traj export": "traj export BAD --jsonl OUT/e.jsonl",
    "traj export --parquet": "traj export BAD --parquet OUT/e.parquet",
    "traj merge": "traj merge GOOD BAD --out OUT/merged.mmr",
    "traj repair": "traj repair BAD --out OUT/repaired.mmr",
    "view": "view BAD --out OUT/page.html",
    "render": "render BAD --model MODEL",
    "render --row": "render BAD --model MODEL --row 0",
    "render --json": "render BAD --model MODEL --json",
    "render --tools": "render CONVERSATION --model MODEL --tools BAD",
    "render --chat-template": "render CONVERSATION --model MODEL --chat-template BAD",
    "render --model": "render CONVERSATION --model BAD",
    "doctor --model": "doctor http://127.0.0.1:9 --model BAD",
}
TARGETS = {
    "traj export": "traj export GOOD --jsonl BAD",
    "traj export --parquet": "traj export GOOD --parquet BAD",
    "traj merge": "traj merge GOOD --out BAD",
    "traj repair": "traj repair GOOD --out BAD",
    "demo": "demo --out BAD",
    "init": "init BAD",
}


def bad_inputs(directory: Path) -> dict[str, str]:
    made = {
        name: directory / name for name in ("directory", "\x1bred", "zeros", "text.json", "pipe", "loop", "torn.mmr")
    }
    made["directory"].mkdir()
    (made["directory"] / "a.txt").write_text("a")
    made["\x1bred"].write_bytes(np.random.default_rng(0).bytes(5000))
    made["zeros"].write_bytes(bytes(5000))
    made["text.json"].write_text("hello, this is no JSON {{ oops")
    os.mkfifo(made["pipe"])
    made["loop"].symlink_to("loop")
    sound = file_of(directory / "sound.mmr", short("a"))
    made["torn.mmr"].write_bytes(sound.read_bytes()[:8] + b"\xff\xff" + sound.read_bytes()[10:])
    others = {"missing": directory / "nowhere" / "at all", "a name too long": directory / ("x" * 300)}
    devices = {"/dev/full": Path("/dev/full"), "/dev/zero": Path("/dev/zero")}
    surrogate = {"a name that is not Unicode": directory / os.fsdecode(b"b\xffd")}
    return {name: str(path) for name, path in (made | others | devices | surrogate).items()}


def bad_targets(directory: Path) -> dict[str, str]:
    directory.mkdir()
    (directory / "file").write_text("precious")
    os.mkfifo(directory / "pipe")
    return {
        "a file": str(directory / "file"),
        "below a file": str(directory / "file" / "below"),
        "a pipe": str(directory / "pipe"),
        "/dev/full": "/dev/full",
        "below a process": "/proc/1/fdinfo/nowhere/x",
        "a name too long": str(directory / ("x" * 300)),
    }


def invoke(directory: Path, commands: list[list[str]]) -> list[list[Any]]:
    (directory / "commands.json").write_text(json.dumps(commands))
    driver = [sys.executable, "-c", DRIVER, str(directory / "commands.json")]
    environment = os.environ | {"COLUMNS": "200", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        driver,
        check=False,
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(commands), f"{commands[len(results)]}: {done.stderr[-2000:]}"
    return results


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("good")
    (directory / "c.json").write_text('[{"role": "user", "content": "Hi"}]')
    good = file_of(directory / "good.mmr", forked(), short("b"))
    return {"GOOD": str(good), "CONVERSATION": str(directory / "c.json"), "MODEL": str(tiny_model_dir)}


def arguments_of(command: str, places: dict[str, str]) -> list[str]:
    arguments = []
    for word in command.split():
        head, slash, rest = word.partition("/") if word.startswith("OUT/") else (word, "", "")
        arguments.append(places.get(head, head) + slash + rest)
    return arguments


def check(command: list[str], result: list[Any], path: str) -> None:
    code, output, error, kind = result
    assert kind in (None, "SystemExit"), (command, kind, error)
    assert "Traceback" not in output + error, (command, error)
    assert "\x1b" not in output + error, (command, error)
    assert code not in (0, None), (command, output, error)
    printed = (output + error).replace("\n", "")
    name = path.encode("utf-8", "backslashreplace").decode()
    forms = {path, path[:80] if len(path) > 255 else path, name, printable(path), repr(path)[1:-1]}
    # The error of a file that is read and is no template names the chat template of the model.
    template = "--chat-template" in command and "the chat template of" in printed
    named = any(form in printed for form in forms) or template
    assert named, f"{command}: {error}"


class Case(NamedTuple):
    """A command, and the path that it must name."""

    command: list[str]
    path: str


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, places: dict[str, str]
) -> dict[str, list[tuple[Case, list[Any]]]]:
    """What the commands print for bad input ("inputs") and for places to which they cannot write ("targets")."""
    directory = tmp_path_factory.mktemp("bad")
    cases: dict[str, list[Case]] = {"inputs": [], "targets": []}
    for kind, commands, paths in (
        ("inputs", COMMANDS, bad_inputs(directory)),
        ("targets", TARGETS, bad_targets(directory / "targets")),
    ):
        for number, path in enumerate(paths.values()):
            out = directory / f"{kind}{number}"
            out.mkdir()
            for command in commands.values():
                cases[kind].append(Case(arguments_of(command, places | {"BAD": path, "OUT": str(out)}), path))
    found = iter(invoke(directory, [case.command for kind in cases.values() for case in kind]))
    assert (directory / "targets" / "file").read_text() == "precious"
    return {kind: [(case, next(found)) for case in those] for kind, those in cases.items()}


@pytest.mark.slow
def test_every_command_refuses_every_kind_of_bad_input_with_a_line_that_names_it(results: dict[str, Any]) -> None:
    for case, result in results["inputs"]:
        check(case.command, result, case.path)


@pytest.mark.slow
def test_every_command_refuses_every_place_that_it_cannot_write_to(results: dict[str, Any]) -> None:
    for case, result in results["targets"]:
        check(case.command, result, case.path)


#: Where a script of bash leaves standard output, and what follows: an exit code and the start of the errors.
FULL = ('"$@" >/dev/full', 2, "error: standard output: No space left on device\n")
CLOSED = ('"$@" >&-', 2, "error: standard output is closed")
UNREAD = ('set -o pipefail; "$@" | :', 1, "")


def run_in_shell(script: str, command: str, places: dict[str, str]) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-c", "from rollouts.cli.main import main; main()", *arguments_of(command, places)]
    arguments = ["bash", "-c", script, "bash", *start]
    return subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=MOST_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("output", [FULL, CLOSED, UNREAD])
@pytest.mark.parametrize("command", ["--help", "traj ls GOOD", "render CONVERSATION --model MODEL --json"])
def test_an_output_that_takes_nothing_is_named(
    command: str, output: tuple[str, int, str], places: dict[str, str]
) -> None:
    script, code, error = output
    done = run_in_shell(script, command, places)
    assert (done.returncode, done.stderr[: len(error)]) == (code, error)
    assert done.stderr.count("\n") == (code == 2)


@pytest.mark.slow
def test_a_conversation_may_come_through_a_pipe(places: dict[str, str]) -> None:
    script = f'"$@" <(cat {places["CONVERSATION"]})'
    done = run_in_shell(script, "render --model MODEL --json", places)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["messages"][0]["role"] == "user"


def test_a_page_takes_the_place_of_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"device or a pipe.*/pipe'"):
        write_html([short("a")], tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
