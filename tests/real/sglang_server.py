"""A real SGLang server on the CPU as a child process, on a free port."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import pytest

_HERE = Path(__file__).parent
_VERSION = "0.5.23"  # as in setup_sglang.sh

#: How long a test waits for a server to start, also on a busy machine.
LONGEST_SECONDS = 300.0

_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(_HERE / "sglang_on_cpu"),
}
_ARGUMENTS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--mm-attention-backend", "sdpa"),
    *("--sampling-backend", "pytorch", "--disable-cuda-graph", "--dtype", "float32"),
    *("--context-length", "4096", "--max-total-tokens", "16384", "--max-running-requests", "8"),
    *("--skip-server-warmup", "--enable-metrics", "--mem-fraction-static", "0.1"),
    "--sleep-on-idle",  # otherwise its scheduler takes a core while it waits for requests
)
# Its input ends when the process of the tests ends, even if it was killed; then it kills the processes of the server.
_WATCHDOG = 'read -r _; kill -9 "-$0"'


def sglang_venv() -> Path:
    """The environment that setup_sglang.sh made; skips the test where there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    venv = Path(os.environ.get("MMROLLOUTS_SGLANG_VENV") or cache / "mmrollouts" / f"sglang-{_VERSION}")
    if not (venv / "mmrollouts-stamp").exists():
        pytest.skip(f"no SGLang in {venv}: run tests/real/setup_sglang.sh, or set MMROLLOUTS_SGLANG_VENV")
    return venv


class SGLangServer:
    """`python -m sglang.launch_server` of a checkpoint."""

    def __init__(
        self, model_dir: Path, log_path: Path, *, arguments: Sequence[str] = (), variables: Mapping[str, str] = {}
    ) -> None:
        venv = sglang_venv()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}"
        self.model_dir = model_dir
        self._log_path = log_path
        inherited = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR", "LANG")}
        self._process = subprocess.Popen(
            [
                *(str(venv / "bin" / "python"), "-m", "sglang.launch_server", "--model-path", str(model_dir)),
                *("--host", "127.0.0.1", "--port", str(port), *_ARGUMENTS, *arguments),
            ],
            env={**inherited, **_ENVIRONMENT, **variables},
            stdout=log_path.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._watchdog = subprocess.Popen(
            ["sh", "-c", _WATCHDOG, str(self._process.pid)], stdin=subprocess.PIPE, start_new_session=True
        )

    def until_healthy(self) -> None:
        deadline = time.monotonic() + LONGEST_SECONDS
        while not self.is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = self._log_path.read_text(encoding="utf-8", errors="replace")[-4000:]
                self.stop()
                raise RuntimeError(f"SGLang did not start: {tail}")
            time.sleep(0.2)

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.base_url}/health", timeout=60, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._watchdog.kill()
        self._watchdog.wait()
