"""The commands in errors about missing packages: what pip wrote about the installation decides them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from renderers.errors import MissingExtraError
from renderers.installation import install_command


def plant_installation(directory: Path, monkeypatch: pytest.MonkeyPatch, direct_url: dict[str, Any] | None) -> None:
    """Let `importlib.metadata` find an installation of mmrollouts with this direct_url.json before the real one."""
    metadata = directory / "site" / "mmrollouts-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.4\nName: mmrollouts\nVersion: 0.1.0\n")
    if direct_url is not None:
        (metadata / "direct_url.json").write_text(json.dumps(direct_url))
    monkeypatch.syspath_prepend(metadata.parent)


@pytest.mark.parametrize(
    "direct_url",
    [
        None,  # from an index
        {"url": "file:///wheels/mmrollouts-0.1.0-py3-none-any.whl", "archive_info": {}},
        {"url": "file:///a/checkout", "dir_info": {}},
    ],
)
def test_the_command_of_a_wheel_names_the_distribution(
    direct_url: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_installation(tmp_path, monkeypatch, direct_url)
    command = 'pip install "mmrollouts[audio,video]"'
    assert install_command("audio,video") == command
    error = MissingExtraError("decoding", "audio,video", "av")
    assert str(error) == f"decoding needs av, not installed here: {command}"


def test_a_shell_reads_the_path_of_the_checkout_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / 'a "$HOME" `b` \\c'
    plant_installation(tmp_path, monkeypatch, {"url": checkout.as_uri(), "dir_info": {"editable": True}})
    script = f"pip() {{ printf '%s\\n' \"$@\"; }}; {install_command('audio')}"
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["install", "-e", f"{checkout}[audio]"]
