"""A server as a child process: started, watched until it is ready, ended with this process."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from rollouts.errors import ArgumentError, EngineStartError

_LOG_LINES, _LOG_BYTES = 20, 8192


class ServerProcess:
    """Runs `command` with `environment` added to that of this process; what it prints goes to `log_path`.

    Without a `log_path` the log is a temporary file, which is kept if the server fails. The server, and every
    process that it starts, ends when `stop` is called and when this process ends, however it ends. Raises
    `ArgumentError`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
            raise ArgumentError("command", command, "pass a list of texts: the program and its arguments")
        self.command = tuple(command)
        self._environment = dict(environment or {})
        #: Where the output of the server is; None before the first start without a given path.
        self.log_path = None if log_path is None else Path(log_path)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self, is_ready: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Start the server; return once `is_ready()`.

        Raises `EngineStartError`, with the last lines of the log, if the command cannot be run, ends, or is
        not ready after `seconds`; then nothing of it is left running. A cancelled call leaves nothing running
        either.
        """
        await asyncio.to_thread(self._spawn)
        try:
            async with asyncio.timeout(seconds):
                while not await is_ready():
                    if not self.is_running:
                        raise self.exit_error()
                    await asyncio.sleep(0.1)
        except TimeoutError:
            await self.stop()
            raise self._error(f"it was not ready after {seconds:g} s") from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the server and its processes, and return when they have ended."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        await asyncio.shield(asyncio.to_thread(process.wait))

    def exit_error(self) -> EngineStartError:
        """The error of a server that has ended by itself."""
        assert self._process is not None
        return self._error(f"it ended with status {self._process.poll()}")

    def _spawn(self) -> None:
        if self.log_path is None:
            handle, name = tempfile.mkstemp(prefix="rollouts-server-", suffix=".log")
            os.close(handle)
            self.log_path = Path(name)
        # A server that is told to end is killed after this time.
        # -I: neither the working directory nor the environment changes what the script imports.
        supervisor = [sys.executable, "-I", str(Path(__file__).with_name("supervisor.py")), str(20)]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  the user's own command
                [*supervisor, *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )

    def _error(self, reason: str) -> EngineStartError:
        """The error with the end of the log."""
        lines: list[str] = []
        if self.log_path is not None and self.log_path.exists():
            with self.log_path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - _LOG_BYTES))
                lines = log.read().decode("utf-8", "replace").splitlines()
        return EngineStartError(" ".join(self.command), reason, "\n".join(lines[-_LOG_LINES:]), self.log_path)
