"""Commands whose output does not fit on the disk leave nothing that is half-written, and name the file of the user."""

import json
import subprocess
import sys
from typing import Any

import pytest
from trajectory_files import file_of, forked, short

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")

#: Commands, with what each writes below DISK. What `whole` names may stay after an error, because it is complete.
COMMANDS: dict[str, dict[str, Any]] = {
    "traj export --jsonl": {"command": "traj export FILE --jsonl DISK/new/e.jsonl"},
    "traj export --parquet": {"command": "traj export FILE --parquet DISK/e.parquet"},
    "traj merge": {"command": "traj merge FILE FILE --out DISK/merged.mmr"},
    "traj repair": {"command": "traj repair FILE --out DISK/repaired.mmr"},
    "view": {"command": "view FILE --out DISK/page.html"},
    "report": {"command": "report RUN --out DISK/r.html", "whole": "r-viewer.html"},
    "init": {"command": "init DISK/new/project"},
}

# Runs each command on disks with 0, 1, 2, 4... free pages, until one is large enough. Prints, for each disk, the exit
# code, what was printed, and the files that are left with their sizes.
DRIVER = """
import json, os, subprocess, sys
from pathlib import Path
from typer.testing import CliRunner
from rollouts.cli.main import app

disk = Path(sys.argv[1])
reports = {}
for name, command in json.loads(sys.stdin.read()).items():
    free, reports[name] = 0, []
    while not reports[name] or reports[name][-1][0]:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk], check=True)
        filling = 4 * 2**20 - 4096 * free
        (disk / "filling").write_bytes(bytes(filling))
        result = CliRunner().invoke(app, command.split())
        left = {str(path.relative_to(disk)): path.stat().st_size for path in sorted(disk.rglob("*")) if path.is_file()}
        left |= {str(path.relative_to(disk)): None for path in sorted(disk.rglob("*")) if path.is_dir()}
        assert left.pop("filling") == filling
        reports[name].append([result.exit_code, result.output, left])
        subprocess.run(["umount", disk], check=True)
        assert free < 1024, reports[name]
        free = 2 * free or 1
sys.stderr.write(json.dumps(reports))
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str, dict[str, int | None]]]]:
    directory = tmp_path_factory.mktemp("full")
    disk = directory / "disk"
    disk.mkdir()
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "none", str(disk)]
    if (refused := subprocess.run(probe, capture_output=True, text=True)).returncode:
        pytest.skip(f"no file system can be mounted here: {refused.stderr.strip()}")
    file = file_of(directory / "t.mmr", forked(), *(short(f"e{number}", level=number) for number in range(40)))
    (directory / "run").mkdir()
    file_of(directory / "run" / "trajectories.mmr", forked(), short("e"))
    places = {"FILE": file, "DISK": disk, "RUN": directory / "run"}
    commands = {}
    for name, entry in COMMANDS.items():
        commands[name] = entry["command"]
        for place, path in places.items():
            commands[name] = commands[name].replace(place, str(path))
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", DRIVER, str(disk)],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stderr)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.slow
def test_on_a_full_disk_nothing_half_written_is_left_and_the_error_names_the_users_path(
    name: str, reports: dict[str, list[tuple[int, str, dict[str, int | None]]]]
) -> None:
    *failures, (code, output, complete) = reports[name]
    assert code == 0, output
    assert any(size for size in complete.values())
    assert failures
    target = COMMANDS[name]["command"].partition("DISK")[2].split()[0]
    whole = COMMANDS[name].get("whole", "nothing")
    for code, output, left in failures:
        assert code in (1, 2), output
        # The file of the command, or one beside it that has its name when all is written.
        assert f"/disk{target}" in output or any(f"/disk/{path}: " in output for path in complete), output
        assert "No space left on device" in output
        assert "/disk/." not in output
        assert ".unfinished" not in output
        files = {path: size for path, size in left.items() if size is not None}
        assert [path for path in files if not path.endswith(whole)] == []
        assert files == {path: complete[path] for path in files}
        assert left == files or files, f"{set(left)}: a directory without files"
