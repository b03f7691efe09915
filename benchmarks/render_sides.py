"""The two packages that `render.py` compares, each in its own process: both have the import name `renderers`.

    python benchmarks/render_sides.py ours|peer MODEL_DIR TEMPLATES_JSON

The process of a side responds to requests, one JSON line each; `Worker` sends them.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from render_jobs import Job, Message

PEER_VERSION = "0.1.12"
# It imports httpx, which only older releases of its declared dependencies install.
PEER_PACKAGES = (f"renderers[transformers]=={PEER_VERSION}", "httpx")


class Worker:
    """The process of one side."""

    def __init__(self, side: str, python: Path, *arguments: Path, script: Path = Path(__file__)) -> None:
        self._side = side
        self._process = subprocess.Popen(
            [python, script.resolve(), side, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment_of(side),
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes its input; it ends then

    def seconds(self, call: str, jobs: Sequence[Job]) -> list[float]:
        """The time of the call for each job, by the clock of `serve`."""
        seconds: list[float] = self._ask(call, jobs, answers=False)["seconds"]
        return seconds

    def answer(self, call: str, job: Job) -> Any:
        """The return value of the call."""
        return self._ask(call, [job], answers=True)["answers"][0]

    def _ask(self, call: str, jobs: Sequence[Job], *, answers: bool) -> dict[str, Any]:
        requests, responses = self._process.stdin, self._process.stdout
        assert requests is not None
        assert responses is not None
        with suppress(BrokenPipeError):  # then there is no response either
            requests.write(json.dumps({"do": call, "jobs": jobs, "answers": answers}) + "\n")
            requests.flush()
        line = responses.readline()
        if not line:
            raise RuntimeError(f"the process of {self._side!r} ended during {call!r}; its error output is above")
        response: dict[str, Any] = json.loads(line)
        return response


def serve(*calls: Callable[[Any], Any], clock: Callable[[], float] = time.process_time) -> None:
    """Answer `{"do": name of a call, "jobs": [...], "answers": bool}`, one line each, until the input ends.

    The response holds the seconds of each job's call (processor time, unless another `clock` is given: other work of
    the machine does not count) and, with `answers`, the return values. Every job is parsed from JSON anew, as from a
    data set or an engine: its objects are new even where its values are not.
    """
    by_name = {call.__name__: call for call in calls}
    gc.collect()
    gc.freeze()  # the garbage collector scans the objects of the calls, not those of the loaded libraries
    for line in sys.stdin:
        request = json.loads(line)
        call = by_name[request["do"]]
        seconds: list[float] = []
        answers: list[Any] = []
        for job in request["jobs"]:
            started = clock()
            answer = call(job)
            seconds.append(clock() - started)
            if request["answers"]:
                answers.append(answer)
            del answer  # freed here, outside the next call's time
        print(json.dumps({"seconds": seconds, "answers": answers}), flush=True)


def serve_ours(model_dir: str, sources: Mapping[str, str]) -> None:
    # Imported here, because in the peer's process the same name is the other package.
    from renderers import RenderedTokens, load_renderer
    from renderers.template.chat_template import ChatTemplate

    renderer = load_renderer(model_dir)

    @functools.cache
    def compiled(name: str) -> ChatTemplate:
        return ChatTemplate(sources[name], model=name)

    def rendered(job: Job) -> RenderedTokens:
        return renderer.render(job["messages"], tools=job["tools"], add_generation_prompt=True)

    def render(job: Job) -> list[int]:
        return rendered(job).token_ids

    def render_with_columns(job: Job) -> list[int]:
        """With the attribution of every token, which the peer builds at once and this project when it is first read."""
        result = rendered(job)
        assert len(result.message_indices) == len(result.sampled_mask) == len(result.is_content)
        return result.token_ids

    def bridge(job: Job, previous: list[Message] | None = None) -> list[int] | None:
        bridged = renderer.bridge_to_next_turn(
            job["prompt"], job["completion"], job["new"], tools=job["tools"], previous_messages=previous
        )
        return None if bridged is None else bridged.token_ids

    def bridge_with_history(job: Job) -> list[int] | None:
        return bridge(job, job["previous"])

    def copy(job: Job) -> list[int]:
        return [*job["prompt"], *job["completion"]]

    def print_template(job: Job) -> str:
        template = compiled(job["template"])
        printed = template.print(job["messages"], tools=job["tools"], add_generation_prompt=True, **job["variables"])
        return printed.text

    def turn_end(_: Job) -> int:
        return renderer.get_stop_token_ids()[0]

    serve(render, render_with_columns, bridge, bridge_with_history, copy, print_template, turn_end)


def serve_peer(model_dir: str, sources: Mapping[str, str]) -> None:
    from transformers import AutoTokenizer
    from transformers.utils.chat_template_utils import _compile_jinja_template

    from renderers import Qwen3RendererConfig, create_renderer  # type: ignore[attr-defined]

    # "all": by default no user message is bridged, since the template may drop reasoning there; these turns hold none.
    config = Qwen3RendererConfig(thinking_retention="all")
    renderer = create_renderer(AutoTokenizer.from_pretrained(model_dir), config)
    # Not the renderer's tokenizer, whose cache of words would speed up the second caller.
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    @functools.cache
    def compiled(name: str) -> Any:
        return _compile_jinja_template(sources[name])

    def render(job: Job) -> Any:
        return renderer.render(job["messages"], tools=job["tools"], add_generation_prompt=True).token_ids

    def bridge(job: Job) -> Any:
        bridged = renderer.bridge_to_next_turn(job["prompt"], job["completion"], job["new"], tools=job["tools"])
        return None if bridged is None else bridged.token_ids

    def apply_chat_template(job: Job) -> Any:
        return tokenizer.apply_chat_template(
            job["messages"], tools=job["tools"], add_generation_prompt=True, tokenize=True, return_dict=False
        )

    def print_template(job: Job) -> Any:
        return compiled(job["template"]).render(
            messages=job["messages"],
            tools=job["tools"],
            documents=None,
            add_generation_prompt=True,
            **job["variables"],
        )

    serve(render, bridge, apply_chat_template, print_template)


def environment_of(side: str) -> dict[str, str]:
    """The environment of a side; for the peer without this project on its path, and with transformers offline."""
    if side == "ours":
        return dict(os.environ)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def install_peer(*more: str) -> Path:
    """The Python of the peer's virtual environment, which is created under the cache directory if it is missing.

    `more` are additional packages; each set has its own environment.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    name = "-".join([f"renderers-{PEER_VERSION}", *(package.partition("=")[0] for package in more), version])
    directory = cache / "mmrollouts-benchmarks" / name
    python = directory / "bin" / "python"
    complete = directory / "complete"  # written last: an interrupted installation is repeated
    if not complete.is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PEER_PACKAGES, *more], check=True)
        complete.touch()
    return python


def main(side: str, model_dir: str, templates: str) -> None:
    sources = json.loads(Path(templates).read_text(encoding="utf-8"))
    {"ours": serve_ours, "peer": serve_peer}[side](model_dir, sources)


if __name__ == "__main__":
    main(*sys.argv[1:])
