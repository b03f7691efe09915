"""Codex CLI and Claude Code, as their users install them, play a task against the gateway: one trajectory, no fork.

    python tests/dropin/coding_agents.py [--directory DIRECTORY]

npm installs both (660 MB) in DIRECTORY, a folder of the user's cache by default. A scripted engine thinks, calls five
tools, two of them at once, looks at an image on disk, and writes a file. Each agent gets a home directory of its own,
and of the environment only PATH. Their configuration says where the model is, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from served_in_thread import ServedInThread

from renderers import load_renderer
from rollouts import Trajectory
from rollouts.serve.app import create_app
from rollouts.serve.gateway.routes import Gateway
from rollouts.testing import ScriptedEngine, tiny_qwen3_vl

PACKAGES = ("@openai/codex@0.171.0", "@anthropic-ai/claude-code@2.1.197")
QUESTION = "Which colour has red.png? Write it to colour.txt."
FINAL = "It is red."
KEPT = ("PATH", "LANG")


class Agent(NamedTuple):
    """A coding agent: its command, its environment and files for a server, and the calls of the script by turn.

    `ignored_tools` are types of the tools that it offers and the gateway leaves out.
    """

    name: str
    command: Sequence[str]
    environment: Callable[[str], dict[str, str]]
    files: Callable[[str], dict[str, str]]
    turns: Callable[[Path], list[list[tuple[str, dict[str, Any]]]]]
    ignored_tools: Sequence[str] = ()


def codex_config(url: str) -> str:
    return f"""
model = "policy"
model_provider = "gateway"
[model_providers.gateway]
name = "gateway"
base_url = "{url}/v1"
env_key = "GATEWAY_KEY"
wire_api = "responses"
"""


AGENTS = (
    Agent(
        "codex",
        ("codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", QUESTION),
        lambda url: {"GATEWAY_KEY": "none"},
        lambda url: {".codex/config.toml": codex_config(url)},
        lambda work: [
            [("multi_agent_v1__close_agent", {"target": "nobody"})],
            [("view_image", {"path": str(work / "red.png")})],
            [("exec_command", {"cmd": "echo red > colour.txt"})],
            [("exec_command", {"cmd": "cat colour.txt"}), ("exec_command", {"cmd": "wc -c colour.txt"})],
        ],
        ("web_search",),
    ),
    Agent(
        "claude",
        ("claude", "--print", QUESTION, "--allowedTools", "Bash,Read,Write"),
        lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": "policy",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        lambda url: {},
        lambda work: [
            [("Bash", {"command": "ls", "description": "List files"})],
            [("Read", {"file_path": str(work / "red.png")})],
            [("Write", {"file_path": str(work / "colour.txt"), "content": "red\n"})],
            [
                ("Bash", {"command": "cat colour.txt", "description": "Print the file"}),
                ("Bash", {"command": "wc -c colour.txt", "description": "Count bytes"}),
            ],
        ],
    ),
)


def script(turns: Sequence[Sequence[tuple[str, dict[str, Any]]]]) -> list[str]:
    """The completions of a conversation with the calls of each turn."""
    completions = []
    for number, calls in enumerate(turns):
        blocks = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
        called = "".join(f"\n<tool_call>\n{block}\n</tool_call>" for block in blocks)
        completions.append(f"<think>\nStep {number}.\n</think>\n\nI go on.{called}")
    return [*completions, FINAL]


def play(agent: Agent, programs: Path, renderer: Any) -> tuple[Trajectory, dict[str, float], str]:
    """The trajectory of the agent's task, the reasons of its forks, and what the agent printed."""
    with tempfile.TemporaryDirectory() as directory:
        home, work = Path(directory, "home"), Path(directory, "work")
        work.mkdir()
        Image.new("RGB", (64, 64), "red").save(work / "red.png")
        engine = ScriptedEngine(script(agent.turns(work)), renderer=renderer)
        gateway = Gateway(engine, renderer, ignored_tools=agent.ignored_tools)
        with ServedInThread(create_app(gateway)) as server:
            url = f"{server.base_url}/sessions/{agent.name}"
            for name, text in agent.files(url).items():
                path = home / name
                path.parent.mkdir(parents=True)
                path.write_text(text)
            home.mkdir(exist_ok=True)
            inherited = {name: os.environ[name] for name in KEPT if name in os.environ}
            ended = subprocess.run(
                [str(programs / agent.command[0]), *agent.command[1:]],
                cwd=work,
                env={**inherited, "HOME": str(home), **agent.environment(url)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if ended.returncode:
                raise SystemExit(f"{agent.name} failed:\n{ended.stdout}\n{ended.stderr}")
            (session,) = (one for one in gateway.sessions() if one.id == agent.name)
            metrics = session.trajectory.metrics
            assert {f"ignored_tools/{name}" for name in agent.ignored_tools} <= metrics.keys()
            assert (work / "colour.txt").read_text() == "red\n"
            forks = {name: count for name, count in metrics.items() if name.startswith("forks/")}
            return gateway.trajectory(agent.name), forks, ended.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    parser.add_argument("--directory", type=Path, default=cache / "mmrollouts" / "coding-agents")
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    npm = ["npm", "install", "--no-fund", "--no-audit", "--silent", "--prefix", str(directory), *PACKAGES]
    subprocess.run(npm, check=True)
    with tempfile.TemporaryDirectory() as model:
        renderer = load_renderer(tiny_qwen3_vl(model, weights=False))
        for agent in AGENTS:
            trajectory, reasons, printed = play(agent, directory / "node_modules" / ".bin", renderer)
            calls = sum(len(turn.message.get("tool_calls") or ()) for turn in trajectory.turns)
            images = len(list(trajectory.all_media()))
            branches = len(trajectory.leaves())
            print(f"{agent.name}: {len(trajectory.turns)} turns, {calls} calls, {images} images, {branches} branches")
            assert printed.strip().endswith(FINAL), printed
            assert (len(trajectory.turns), calls, images, branches, reasons) == (5, 5, 1, 1, {})


if __name__ == "__main__":
    main()
