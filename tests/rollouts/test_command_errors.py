"""Bad input, and output that cannot be written: no traceback, an exit code, and a line that names the path."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trajectory_files import file_of, forked, png, short

from renderers import MediaSource, MediaStore
from rollouts.terminal.table import printable
from transport import RecordReader

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes and devices of POSIX")
MOST_SECONDS = 90

# Runs many commands and prints the result of each, in a process of its own: one that hangs can be killed.
DRIVER = """
import json, sys
from typer.testing import CliRunner
from rollouts.cli.main import app
runner = CliRunner()
for arguments in json.load(open(sys.argv[1])):
    result = runner.invoke(app, arguments)
    kind = None if result.exception is None else type(result.exception).__name__
    print(json.dumps([result.exit_code, result.stdout, result.stderr, kind]), flush=True)
"""

# BAD stands for the bad input, GOOD for a valid file; CONVERSATION, MODEL and OUT for a file and two directories.
COMMANDS = {
    "traj ls": "traj ls BAD",
    "traj ls --json": "traj ls BAD --json",
    "traj show": "traj show BAD",
    "traj verify": "traj verify BAD",
    "traj export": "traj export BAD --jsonl OUT/e.jsonl",
    "traj export --parquet": "traj export BAD --parquet OUT/e.parquet",
    "traj merge": "traj merge GOOD BAD --out OUT/merged.mmr",
    "traj repair": "traj repair BAD --out OUT/repaired.mmr",
    "media ls": "media ls BAD",
    "media ls --json": "media ls BAD --json",
    "media verify": "media verify BAD",
    "media export": "media export BAD --out OUT/media",
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
    "media export": "media export GOOD --out BAD",
    "media export --contact-sheet": "media export GOOD --out OUT/media --contact-sheet BAD",
    "demo": "demo --out BAD",
}


def bad_inputs(directory: Path) -> dict[str, str]:
    made = {
        name: directory / name for name in ("directory", "rubbish", "zeros", "text.json", "pipe", "loop", "torn.mmr")
    }
    made["directory"].mkdir()
    (made["directory"] / "a.txt").write_text("a")
    made["rubbish"].write_bytes(np.random.default_rng(0).bytes(5000))
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
    assert code not in (0, None), (command, output, error)
    printed = (output + error).replace("\n", "")
    name = path.encode("utf-8", "backslashreplace").decode()
    forms = {path, path[:80] if len(path) > 255 else path, name, printable(path)}
    # The error of a file that is read and is no template names the chat template of the model.
    template = "--chat-template" in command and "the chat template of" in printed
    named = any(form in printed for form in forms) or template
    assert named, f"{command}: {error}"


def test_every_command_refuses_every_kind_of_bad_input_with_a_line_that_names_it(
    tmp_path: Path, places: dict[str, str]
) -> None:
    inputs = bad_inputs(tmp_path)
    cases = []
    for number, (kind, path) in enumerate(inputs.items()):
        for command in COMMANDS.values():
            out = str(tmp_path / f"out{number}")
            os.makedirs(out, exist_ok=True)
            cases.append((kind, path, arguments_of(command, places | {"BAD": path, "OUT": out})))
    for (_, path, command), result in zip(cases, invoke(tmp_path, [case[2] for case in cases]), strict=True):
        check(command, result, path)


def test_every_command_refuses_every_place_that_it_cannot_write_to(tmp_path: Path, places: dict[str, str]) -> None:
    cases = []
    for number, path in enumerate(bad_targets(tmp_path / "targets").values()):
        for name, command in TARGETS.items():
            if name == "media export --contact-sheet" and os.path.isfile(path):
                continue  # drawn anew
            out = str(tmp_path / f"out{number}")
            cases.append((path, arguments_of(command, places | {"BAD": path, "OUT": out})))
    for (path, command), result in zip(cases, invoke(tmp_path, [case[1] for case in cases]), strict=True):
        check(command, result, path)
    assert (tmp_path / "targets" / "file").read_text() == "precious"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(tmp_path: Path, places: dict[str, str]) -> None:
    path = tmp_path / "unreadable"
    path.write_bytes(Path(places["GOOD"]).read_bytes())
    path.chmod(0)
    commands = [
        arguments_of(one, places | {"BAD": str(path), "OUT": str(tmp_path / "out")}) for one in COMMANDS.values()
    ]
    for command, result in zip(commands, invoke(tmp_path, commands), strict=True):
        check(command, result, str(path))


PRINTING = {
    "help": "--help",
    "traj ls": "traj ls GOOD",
    "traj ls --json": "traj ls GOOD --json",
    "traj show": "traj show GOOD --ids",
    "traj verify": "traj verify GOOD",
    "media ls": "media ls GOOD",
    "media export": "media export GOOD --out OUT/media",
    "render": "render CONVERSATION --model MODEL",
    "render --json": "render CONVERSATION --model MODEL --json",
}
START = "from rollouts.cli.main import main; main()"


def run_in_shell(command: list[str], redirection: str) -> subprocess.CompletedProcess[str]:
    script = f'"$@" {redirection}'
    arguments = ["bash", "-c", script, "bash", sys.executable, "-c", START, *command]
    return subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=MOST_SECONDS)


# Runs each command in a forked process, with both outputs as files of these names: the imports are done once.
FORKING = """
import json, os, sys
from rollouts.cli.main import main
for arguments, output, error in json.loads(sys.stdin.read()):
    child = os.fork()
    if child == 0:
        os.dup2(int(output) if output.isdigit() else os.open(output, os.O_WRONLY), 1)
        os.dup2(os.open(error, os.O_WRONLY | os.O_CREAT), 2)
        sys.argv[1:] = arguments
        main()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run_forked(directory: Path, commands: list[list[str]], output: str | int, error: str = "") -> list[tuple[int, str]]:
    """The exit code of each command, and what it prints as errors unless those go to the file `error`."""
    files = [directory / f"errors{number}" for number in range(len(commands))]
    runs = [(command, str(output), error or str(file)) for command, file in zip(commands, files, strict=True)]
    done = subprocess.run(
        [sys.executable, "-c", FORKING],
        input=json.dumps(runs),
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        pass_fds=[output] if isinstance(output, int) else [],
    )
    assert done.returncode == 0, done.stderr
    texts = [file.read_text() if file.exists() else "" for file in files]
    return list(zip(map(int, done.stdout.split()), texts, strict=True))


def test_a_full_disk_behind_standard_output_is_named(tmp_path: Path, places: dict[str, str]) -> None:
    commands = [arguments_of(command, places | {"OUT": str(tmp_path)}) for command in PRINTING.values()]
    for name, result in zip(PRINTING, run_forked(tmp_path, commands, "/dev/full"), strict=True):
        assert result == (2, "error: standard output: No space left on device\n"), name


@pytest.mark.parametrize("name", ["help", "traj ls", "render --json"])
def test_a_closed_standard_output_is_named(tmp_path: Path, places: dict[str, str], name: str) -> None:
    done = run_in_shell(arguments_of(PRINTING[name], places), ">&-")
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output is closed")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["help", "traj ls", "render --json"])
def test_an_error_has_its_exit_code_if_standard_error_is_closed(places: dict[str, str], name: str) -> None:
    done = run_in_shell(arguments_of(PRINTING[name], places), "2>&- > /dev/full")
    assert done.returncode == 2


def test_an_error_has_its_exit_code_if_standard_error_cannot_be_written(tmp_path: Path, places: dict[str, str]) -> None:
    commands = [arguments_of(PRINTING[name], places) for name in ("help", "traj ls", "render --json")]
    assert run_forked(tmp_path, commands, "/dev/full", "/dev/full") == [(2, "")] * 3


def test_a_pipe_closed_by_its_reader_is_an_exit_code_without_a_message(tmp_path: Path, places: dict[str, str]) -> None:
    commands = [
        arguments_of(PRINTING[name], places) for name in ("traj ls", "traj ls --json", "render", "render --json")
    ]
    read_end, write_end = os.pipe()
    os.close(read_end)  # before the command begins: nobody reads what it prints
    try:
        assert run_forked(tmp_path, commands, write_end) == [(1, "")] * 4
    finally:
        os.close(write_end)


def test_a_conversation_may_come_through_a_pipe(places: dict[str, str]) -> None:
    script = f'"$@" <(cat {places["CONVERSATION"]})'
    command = [sys.executable, "-c", START, "render", "--model", places["MODEL"], "--json"]
    arguments = ["bash", "-c", script, "bash", *command]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=MOST_SECONDS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["messages"][0]["role"] == "user"


def test_a_store_that_holds_a_named_pipe_is_listed_without_waiting(tmp_path: Path) -> None:
    store = MediaStore(directory=tmp_path / "store")
    store.add_source(MediaSource.of(png(1)))
    os.mkfifo(tmp_path / "store" / "pipe")
    pipe_digest = "ab" + "0" * 62
    (tmp_path / "store" / "ab").mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "store" / "ab" / pipe_digest)
    target = str(tmp_path / "store")
    commands = [
        ["media", "ls", target],
        ["media", "verify", target],
        ["media", "export", target, "--out", str(tmp_path)],
    ]
    for command, (_, output, error, kind) in zip(commands, invoke(tmp_path, commands), strict=True):
        assert kind in (None, "SystemExit"), (command, error)
        assert "Traceback" not in output + error


@pytest.mark.parametrize("seconds", [0.0, pytest.param(1.0, marks=pytest.mark.slow), 3.0])
def test_ctrl_c_before_the_first_episode_of_a_demo_prints_one_line_and_names_no_file(
    tmp_path: Path, seconds: float
) -> None:
    pytest.importorskip("sklearn")
    out = tmp_path / "out"
    out.mkdir()
    earlier = file_of(out / "trajectories.mmr", short("of an earlier run"))
    os.utime(earlier, (1, 1))
    marker = tmp_path / "made"
    code = (
        "import rollouts.demo.run as output, pathlib, sys\n"
        "prepare = output.prepare_output\n"
        "def prepare_and_touch_marker(out):\n"
        "    prepare(out)\n"
        f"    pathlib.Path({str(marker)!r}).touch()\n"
        "output.prepare_output = prepare_and_touch_marker\n"
        "from rollouts.cli.main import main\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "demo", "--quick", "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + MOST_SECONDS
        while not marker.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(seconds)  # the moment does not matter: a person may press Ctrl-C at any time
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the child too
        output, _ = process.communicate(timeout=MOST_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "interrupted" in output
    has_episodes = False  # of this run, which makes the file before its first episode
    if earlier.exists() and earlier.stat().st_mtime > 1:
        with RecordReader(earlier) as reader:
            has_episodes = len(reader) > 0
    assert ("trajectories.mmr" in output) == has_episodes
