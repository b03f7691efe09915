"""Evaluates one scripted model with verifiers' own command and with `rollouts eval`: the same results, and how fast.

    python tests/dropin/eval_comparison.py

A server of this process has OpenAI's chat completions, takes no time, and answers by the prompt and by how often it
came before: some answers are right, some are guesses, some are wrong. The same tasks, once with text and once with an
image each, are evaluated by verifiers 0.4.0 (`vf-eval`, in its own environment), by `rollouts eval` in this one, and
by `rollouts eval` with the same verifiers environment (`kind = "verifiers"`). Prints a table, and returns 1 unless
mean reward and pass@1 of all three are equal to the last digit. Episodes per second are those between the first request
and the last response, on a machine that the server shares; the seconds and the CPU of a command contain its start.
Needs the project's `dev` extra; the environments are those of `main.py`, made if they are not there.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import io
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from aiohttp import web
from environments import Environment, InstallError
from PIL import Image

_PROJECT = Path(__file__).resolve().parents[2]
_MODULES = _PROJECT / "tests" / "environments"  # questions_v1.py
SAMPLES = 4
CONCURRENCY = 64


@dataclass(frozen=True)
class Side:
    """What one command found, and how fast: its mean reward, its pass@1, episodes and their seconds at the server.

    `command_seconds` and `cpu_seconds` are those of the whole command.
    """

    name: str
    mean_reward: float
    pass_at_1: float
    episodes: int
    seconds: float
    command_seconds: float
    cpu_seconds: float


def rows(count: int, *, with_images: bool) -> list[dict[str, Any]]:
    """Tasks, each with a prompt of its own."""
    found = []
    for number in range(count):
        text = f"Question {number}: what is {number} + 1?"
        content: Any = text
        if with_images:
            file = io.BytesIO()
            Image.new("RGB", (64, 64), (number % 256, 40, 200)).save(file, "PNG")
            url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
        found.append({"messages": [{"role": "user", "content": content}], "answer": str(number + 1)})
    return found


class Server:
    """Answers the prompts of `tasks` at no cost. `url` is its address while it runs."""

    def __init__(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        self._answers = {_prompt_key(row["messages"]): row["answer"] for row in tasks}
        self.reset()

    def reset(self) -> None:
        self._asked: Counter[str] = Counter()
        self.unknown = 0
        self.first = self.last = 0.0

    @property
    def requests(self) -> int:
        return self._asked.total()

    async def __aenter__(self) -> Server:
        app = web.Application(client_max_size=2**28)
        app.add_routes([web.post("/v1/chat/completions", self._complete)])
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.first = self.first or time.perf_counter()
        key = _prompt_key(body["messages"])
        if key not in self._answers:
            self.unknown += 1
            return web.json_response({"error": {"message": "no prompt of the tasks"}}, status=400)
        text = completion(self._answers[key], self._asked[key])
        self._asked[key] += 1
        message = {"role": "assistant", "content": text}
        self.last = time.perf_counter()
        return web.json_response({
            "id": f"chatcmpl-{self.requests}",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
        })  # fmt: skip


def completion(answer: str, number: int) -> str:
    """The answer to the request `number` for a task: the right one, more or less often by the task, or another."""
    drawn = hashlib.blake2b(f"{answer}/{number}".encode(), digest_size=2).digest()
    if drawn[0] % 10 < int(answer) % 11:
        return f"It is {answer} ."
    return "It is perhaps 0 ." if drawn[1] % 2 else "It is 0 ."


def _prompt_key(messages: Sequence[Mapping[str, Any]]) -> str:
    """The texts and the digests of the images of a conversation, whatever form they are sent in."""
    found = []
    for message in messages:
        content = message["content"]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            url = part.get("image_url", {}).get("url", "")
            image = hashlib.sha256(base64.b64decode(url.partition(",")[2])).hexdigest() if url else ""
            found.append(f"{message['role']}: {part.get('text') or image}")
    return "\n".join(found)


async def run(command: Sequence[object], directory: Path, paths: Sequence[Path]) -> tuple[float, float]:
    """Run a command there, with modules of `paths`; its seconds, and those of its CPU.

    Raises `SystemExit` where it fails.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    started, cpu = time.perf_counter(), _cpu_of_commands()
    child = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=directory,
        env=variables,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await child.communicate()
    if child.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with status {child.returncode}:\n{output.decode()}")
    return time.perf_counter() - started, _cpu_of_commands() - cpu


def _cpu_of_commands() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def with_verifiers(server: Server, directory: Path) -> Side:
    command = [
        Environment("verifiers-0.4.0", "stock").python.with_name("vf-eval"), "questions-v1",
        "--env.taskset.path", directory / "tasks.jsonl", "--env.agent.runtime.type", "subprocess",
        "--client.base-url", server.url, "--client.api-key-var", "NO_API_KEY", "--model", "scripted",
        "--num-rollouts", SAMPLES, "--max-concurrent", CONCURRENCY,
        "--no-rich", "--no-push", "--output-dir", directory, "--run.dir", "verifiers",
    ]  # fmt: skip
    seconds = await run(command, directory, [_MODULES])
    lines = (directory / "verifiers" / "traces.jsonl").read_text(encoding="utf-8").splitlines()
    traces = [trace for line in lines for trace in json.loads(line)["traces"]]
    if not all(trace["ok"] for trace in traces):
        raise SystemExit(
            f"a rollout of verifiers failed: {next(trace['errors'] for trace in traces if not trace['ok'])}"
        )
    rewards = [sum(each["score"] * each["weight"] for each in trace["rewards"].values()) for trace in traces]
    successes = [float(reward >= 1.0) for reward in rewards]
    return _side("vf-eval of verifiers 0.4.0", server, _mean(rewards), _mean(successes), seconds)


def _mean(values: Sequence[float]) -> float:
    """The mean, rounded once."""
    return float(sum(map(Fraction, values)) / len(values))


_CONFIG = """
group_size = {samples}
concurrency = {concurrency}
{tables}
[engine]
kind = "openai"
base_url = "{url}"
model = "scripted"
[sampling]
max_tokens = 64
[output]
directory = "{name}"
report = false
"""
_OWN = """
[tasks]
kind = "jsonl"
path = "tasks.jsonl"
[environment]
kind = "scored_prompt"
[[environment.rewards]]
name = "right"
function = "scoring.py:right"
"""
_VERIFIERS = """
[tasks]
kind = "verifiers"
[environment]
kind = "verifiers"
id = "questions-v1"
arguments = {{ agent.runtime.type = "subprocess", taskset.path = "{path}" }}
"""
_SCORING = """
def right(completion, task):
    text = completion["content"]
    return 1.0 if task.data["answer"] in text.split() else 0.25 if "perhaps" in text else 0.0
"""


async def with_rollouts(server: Server, directory: Path, *, verifiers: bool) -> Side:
    name = "kind-verifiers" if verifiers else "own"
    tables = _VERIFIERS.format(path=directory / "tasks.jsonl") if verifiers else _OWN
    config = _CONFIG.format(samples=SAMPLES, concurrency=CONCURRENCY, tables=tables, url=server.url, name=name)
    (directory / "scoring.py").write_text(_SCORING, encoding="utf-8")
    (directory / f"{name}.toml").write_text(config, encoding="utf-8")
    python = Environment("verifiers-0.4.0", "ours").python if verifiers else Path(sys.executable)
    program = "from rollouts.cli.main import main; main()"
    seconds = await run(
        [python, "-c", program, "eval", f"{name}.toml"], directory, [_PROJECT, *([_MODULES] if verifiers else [])]
    )
    results = json.loads((directory / name / "results.json").read_text(encoding="utf-8"))
    if results["failed"]:
        raise SystemExit(f"{results['failed']} episodes failed: {results['errors']}")
    label = 'rollouts eval, kind = "verifiers"' if verifiers else "rollouts eval"
    return _side(label, server, results["total_reward"]["value"], results["pass_at_k"]["1"]["value"], seconds)


def _side(name: str, server: Server, mean_reward: float, pass_at_1: float, seconds: tuple[float, float]) -> Side:
    if server.unknown:
        raise SystemExit(f"{name} sent {server.unknown} prompts that are not those of the tasks")
    return Side(name, mean_reward, pass_at_1, server.requests, server.last - server.first, *seconds)


def table(title: str, sides: Sequence[Side]) -> str:
    """The figures of the sides, the first of which is the one that the others are compared with."""
    columns = f"{'mean reward':>20}{'pass@1':>20}{'episodes/s':>12}{'':8}{'command (s)':>12}{'CPU (s)':>10}"
    lines = [f"{title}\n{'':36}{columns}"]
    first = sides[0].episodes / sides[0].seconds
    for side in sides:
        rate = side.episodes / side.seconds
        lines.append(
            f"{side.name:36}{side.mean_reward!r:>20}{side.pass_at_1!r:>20}{rate:12,.0f}{rate / first:7.1f}x"
            f"{side.command_seconds:12.1f}{side.cpu_seconds:10.1f}"
        )
    return "\n".join(lines)


def violations(sides: Sequence[Side], episodes: int) -> list[str]:
    """What is not as with verifiers, a line each."""
    first, *others = sides
    found = [f"{side.name}: {side.episodes} episodes, not {episodes}" for side in sides if side.episodes != episodes]
    for side in others:
        for name in ("mean_reward", "pass_at_1"):
            own, theirs = getattr(side, name), getattr(first, name)
            if own != theirs:
                found.append(f"{side.name}: {name} {own!r}, with verifiers {theirs!r}")
    return found


async def compare(tasks: int, *, with_images: bool) -> list[str]:
    given = rows(tasks, with_images=with_images)
    sides = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given), encoding="utf-8")
        async with Server(given) as server:
            for side in (
                lambda: with_verifiers(server, directory),
                lambda: with_rollouts(server, directory, verifiers=False),
                lambda: with_rollouts(server, directory, verifiers=True),
            ):
                server.reset()
                sides.append(await side())
    kind = "an image and text" if with_images else "text"
    print(table(f"{tasks} tasks with {kind} x {SAMPLES} samples, {CONCURRENCY} at once", sides), flush=True)
    return violations(sides, tasks * SAMPLES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100, help="with text")
    parser.add_argument("--tasks-with-images", type=int, default=50)
    chosen = parser.parse_args()
    Environment("verifiers-0.4.0", "stock").prepare()
    ours = Environment("verifiers-0.4.0", "ours")
    if not ours.python.is_file():
        ours.prepare()
    ours.install("scipy>=1.15")  # the extra `eval`
    found = asyncio.run(compare(chosen.tasks, with_images=False))
    found += asyncio.run(compare(chosen.tasks_with_images, with_images=True))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InstallError as error:
        sys.exit(f"InstallError: {error}")
