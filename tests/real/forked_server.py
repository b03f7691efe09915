"""Processes of vLLM, each forked from a template that has imported vLLM (`forked_engine/server_template.py`)."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

FORKED_ENGINE = Path(__file__).parent / "forked_engine"

_templates: dict[Path, ServerTemplate] = {}


def template(venv: Path, environment: Mapping[str, str], log: Path) -> ServerTemplate:
    """The template of a vLLM in this process. The first call starts it, with this environment."""
    if venv not in _templates:
        _templates[venv] = ServerTemplate(venv, environment, log)
    return _templates[venv]


class ForkedServer:
    """The process of a server, which leads a session of its own. It is no child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def ended(self) -> bool:
        return self._ends_within(0)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended; False if it has not after so many seconds."""
        return self._ends_within(seconds)

    def send_signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        os.close(self._descriptor)

    def _ends_within(self, seconds: float | None) -> bool:
        return bool(select.select([self._descriptor], [], [], seconds)[0])


class ServerTemplate:
    """The template of one vLLM: a child process, which ends when this process ends."""

    def __init__(self, venv: Path, environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [str(venv / "bin" / "python"), str(FORKED_ENGINE / "server_template.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environment),
                start_new_session=True,
                text=True,
            )

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkedServer:
        """A server with these arguments of the program `vllm`; `log` gets what it prints."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        server = {"arguments": list(arguments), "environment": dict(environment), "log": str(log)}
        try:
            print(json.dumps(server), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            self._fail()
        if not (process_id := self._process.stdout.readline()):
            self._fail()
        return ForkedServer(int(process_id))

    def _fail(self) -> None:
        raise RuntimeError(f"vLLM cannot be imported:\n{self._log.read_text(errors='replace')[-3000:]}")
