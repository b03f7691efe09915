"""`rollouts run --ray` as a program: with a cluster of its own, and as a job that is submitted to a cluster."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from reserved_ports import reserved_port
from run_config_files import CONFIG, write_run

from transport import RecordReader

pytestmark = pytest.mark.ray

ROLLOUTS = [sys.executable, "-c", "from rollouts.cli.main import main; main()"]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
#: Of the clusters of these tests: where it is not given, Ray makes one in the home directory.
TOKEN = secrets.token_hex(32)
TABLE = "\n[ray]\nworkers = 2\ncpus = 0.5\n"


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    safe = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    return {**kept, **safe, "RAY_USAGE_STATS_ENABLED": "0", **more}


def called(command: list[str], cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=240, check=False
    )


def assert_complete(output: Path) -> None:
    """Two episodes of each of the two tasks, each once."""
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["groups"], summary["episodes"], summary["failed"]) == (2, 4, 0)
    with RecordReader(output / "trajectories.mmr") as records:
        ids = Counter(episode.episode_id for group in records for episode in group)
    assert ids == Counter(f"{task}/{index}.0" for task in ("four", "seven") for index in range(2))


@pytest.mark.contract
def test_a_run_starts_a_cluster_of_its_own_and_ends_it(tmp_path):
    write_run(tmp_path, CONFIG + TABLE)
    ended = called([*ROLLOUTS, "run", "--ray", "run.toml"], tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert_complete(tmp_path / "out")


def test_a_node_without_the_file_or_with_another_one_refuses_the_run(tmp_path):
    path = write_run(tmp_path, CONFIG + TABLE)
    program = (
        "import sys, pathlib\n"
        "from rollouts.run_config.config_file import read_config\n"
        "from rollouts.cli.run.ray_workers import ConfiguredParts\n"
        "ConfiguredParts('run.toml', 'another').make_renderer()\n"
    )
    ended = called([sys.executable, "-c", program], path.parent)
    assert "its environment or renderer are not those of the run; send the same file to all nodes" in ended.stderr
    ended = called([sys.executable, "-c", program.replace("run.toml", "absent.toml")], path.parent)
    assert "there is no such file on this node" in ended.stderr


@pytest.fixture
def head(tmp_path: Path) -> Iterator[str]:
    """A head node with the server for jobs, on the loopback address; the address of that server."""
    port, dashboard, agent = (reserved_port() for _ in range(3))
    options = [f"--dashboard-port={dashboard}", f"--port={port}", "--num-cpus=2", f"--object-store-memory={128 << 20}"]
    # The agent takes the jobs; its usual port is that of the cluster of the other tests.
    options += [f"--dashboard-agent-listen-port={agent}"]
    options += ["--dashboard-host=127.0.0.1", "--node-ip-address=127.0.0.1", "--include-dashboard=true", "--block"]
    command = [*RAY, "start", "--head", *options]
    patient = environment(RAY_DASHBOARD_STARTUP_TIMEOUT_S="600")  # not 60, in which a loaded machine does not start it
    with (tmp_path / "head.log").open("wb") as log:
        node = subprocess.Popen(command, env=patient, stdout=log, stderr=log, start_new_session=True)
    yield f"http://127.0.0.1:{dashboard}"
    node.send_signal(signal.SIGTERM)
    node.wait(60)


def test_a_run_can_be_submitted_as_a_job_with_its_directory(tmp_path, head):
    """The nodes have no other copy of the file and its environment than that of the job."""
    output = tmp_path / "output"
    directory = tmp_path / "job"
    config = CONFIG.replace('directory = "out"', f'directory = "{output}"')
    write_run(directory, config + TABLE)
    submit = [*RAY, "job", "submit", f"--address={head}", "--working-dir", str(directory), "--"]
    ended = None
    for _ in range(60):  # until the server for jobs answers, and has an agent that takes them
        ended = called([*submit, *ROLLOUTS, "run", "--ray", "run.toml"], tmp_path)
        printed = ended.stdout + ended.stderr
        if "Failed to connect to Ray" not in printed and "No available agent" not in printed:
            break
    assert ended is not None
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert_complete(output)
