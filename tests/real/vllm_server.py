"""`vllm serve` as a child process: started on a free port, monitored, killed and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest
from forked_server import FORKED_ENGINE, ForkedServer, template

from rollouts.engines.vllm.metrics import ServerMetrics

MODEL_NAME = "tiny-qwen3vl"

#: How long a test waits for a state that a working server always reaches, also on a busy machine.
LONGEST_SECONDS = 300.0

GENERATED = "vllm:generation_tokens_total"

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCH_COMPILE_DISABLE": "1",  # else the first request with log-probabilities compiles for 17 s
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # No process of its own for the only worker, as vLLM runs on one GPU; with `forked_engine`, a start then takes a
    # fifth of the time.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(FORKED_ENGINE),
}
_PROCESSOR_LIMITS = ("--limit-mm-per-prompt", '{"image":8,"video":0}')
_SOUNDS = ("--limit-mm-per-prompt", '{"image":8,"video":0,"audio":16}')
_SERVE = (
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "4096"),
    *("--enforce-eager", "--skip-mm-profiling"),
    *_PROCESSOR_LIMITS,
)
# Each token of a request passes the model, so that `expert_records.py` records its experts.
_EXPERTS = (
    *("--worker-extension-cls", "expert_records.RecordedExperts"),
    *("--no-enable-prefix-caching", "--max-num-seqs", "1"),
)
# Its input ends when the process of the tests ends, even if it was killed; then it kills the processes of the server.
_WATCHDOG = 'read -r _; kill -9 "-$0"'


@dataclass(frozen=True)
class Mode:
    """How a server is started. `api_key`: the key that it requires. `family`: the model, None for Qwen3-VL.

    `variables` are added to its environment. `rust_frontend`: vLLM's Rust frontend serves HTTP before the engine.
    """

    dtype: str = "float32"
    family: str | None = None
    arguments: tuple[str, ...] = ()
    scale_out: bool = True
    dev_routes: bool = True
    api_key: str | None = None
    subcommand: tuple[str, ...] = ("serve",)
    variables: tuple[tuple[str, str], ...] = ()
    rust_frontend: bool = False

    def vllm_arguments(self, model_dir: Path, port: int) -> list[str]:
        return [
            *(*self.subcommand, str(model_dir)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", MODEL_NAME, "--dtype", self.dtype, "--max-model-len", "4096"),
            *(_SERVE if self.subcommand == ("serve",) else ()),
            *(("--enable-scale-out",) if self.scale_out and self.subcommand == ("serve",) else ()),
            *(("--api-key", self.api_key) if self.api_key else ()),
            *self.arguments,
        ]

    def environment(self) -> dict[str, str]:
        dev_mode = {"VLLM_SERVER_DEV_MODE": "1" if self.dev_routes else "0"}
        frontend = {}
        if self.rust_frontend:  # the engine is a process of its own
            frontend = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(rust_frontend_path())}
            frontend["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        return {**_ENVIRONMENT, **dev_mode, **frontend, **dict(self.variables)}


def rust_frontend_path() -> Path:
    """Where `setup_rust_frontend.sh` puts vLLM's Rust frontend."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("MMROLLOUTS_VLLM_RS") or cache / "mmrollouts" / "vllm-rs-0.33.0")


#: In the order in which tests run; each server is started once.
MODES: Mapping[str, Mode] = {
    "float32": Mode(),
    "float32-host-normalise": Mode(arguments=("--no-mm-device-do-normalize",)),
    # Log-probabilities are those after all options, and of as many tokens as are asked for.
    "processed": Mode(arguments=("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1")),
    "bfloat16": Mode(dtype="bfloat16"),
    "bfloat16-host-normalise": Mode(dtype="bfloat16", arguments=("--no-mm-device-do-normalize",)),
    # So small that requests preempt each other and images evict each other from the encoder cache.
    "small-cache": Mode(arguments=("--num-gpu-blocks-override", "40", "--max-num-batched-tokens", "1024")),
    # Receives tensors of a trainer through files, for which `weight_files.py` stands in the server.
    "transfer": Mode(
        arguments=(
            *("--weight-transfer-config", '{"backend": "files"}'),
            *("--worker-extension-cls", "weight_files.RegisteredBackend"),
        ),
    ),
    "lora": Mode(
        arguments=("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"),
        variables=(("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1"),),
    ),
    "rust": Mode(rust_frontend=True),
    "rust-closed": Mode(rust_frontend=True, dev_routes=False, api_key="open-sesame"),
    # Takes no images, though its model could.
    "text": Mode(arguments=("--language-model-only",)),
    # As many operators start one: a key, no scale-out, no development routes.
    "closed": Mode(scale_out=False, dev_routes=False, api_key="open-sesame"),
    # Without a model: `vllm launch render` only turns messages into ids and features.
    "render": Mode(subcommand=("launch", "render")),
    "gemma3": Mode(family="gemma3"),
    "glm-4.5v": Mode(family="glm-4.5v"),
    "internvl3": Mode(family="internvl3"),
    "idefics3": Mode(family="idefics3"),
    "llava-onevision": Mode(family="llava-onevision"),
    "cohere2-vision": Mode(family="cohere2-vision"),
    "qwen2.5-vl": Mode(family="qwen2.5-vl"),
    "qwen3": Mode(family="qwen3"),
    "qwen2-audio": Mode(family="qwen2-audio", arguments=_SOUNDS),
    "qwen2.5-omni": Mode(family="qwen2.5-omni", arguments=_SOUNDS),
    "audio-flamingo3": Mode(family="audio-flamingo3", arguments=_SOUNDS),
    "qwen3-omni": Mode(family="qwen3-omni", arguments=_SOUNDS),
    "qwen3-asr": Mode(family="qwen3-asr", arguments=_SOUNDS),
    "glm-asr": Mode(family="glm-asr", arguments=_SOUNDS),
    "olmoe": Mode(family="olmoe", arguments=_EXPERTS),
    "qwen3-omni-experts": Mode(family="qwen3-omni", arguments=(*_SOUNDS, *_EXPERTS)),
    # Mistakes of an operator; of an argument that is given twice the last one counts.
    "short": Mode(arguments=("--max-model-len", "96")),
    "raw-logits": Mode(arguments=("--logprobs-mode", "raw_logits", "--limit-mm-per-prompt", '{"image":1,"video":0}')),
    "without-images": Mode(
        arguments=("--logprobs-mode", "processed_logprobs", "--limit-mm-per-prompt", '{"image":0,"video":0}')
    ),
}


@dataclass
class VLLMServer:
    """A vLLM server that the tests started, or (`process` None, `venv` None) one that another user runs.

    `model_dir` is the checkpoint that it was started with, `log_path` what it prints (None for another's server).
    """

    base_url: str
    model_dir: Path
    mode: str
    log_path: Path | None = None
    venv: Path | None = None
    model_name: str = MODEL_NAME
    killed: bool = field(default=False, init=False)
    #: No trust store, which takes longer to load than most requests; no connections that a restart would break.
    http: httpx.Client = field(init=False, repr=False)
    process: ForkedServer | None = field(default=None, init=False, repr=False)
    _watchdog: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(
            base_url=self.base_url,
            verify=False,
            timeout=LONGEST_SECONDS,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    @classmethod
    def start(cls, venv: Path, model_dir: Path, mode: str, log_dir: Path) -> VLLMServer:
        """Start a server and wait until it is healthy; raises `RuntimeError` with the end of its log."""
        server = cls.launch(venv, model_dir, mode, log_dir)
        server.until_healthy()
        return server

    @classmethod
    def launch(cls, venv: Path, model_dir: Path, mode: str, log_dir: Path) -> VLLMServer:
        """Start a server and wait for nothing."""
        server = cls(f"http://127.0.0.1:{_free_port()}", model_dir, mode, log_dir / f"vllm-{mode}.log", venv)
        server._launch()
        return server

    @property
    def ours(self) -> bool:
        return self.venv is not None

    @property
    def api_key(self) -> str | None:
        return MODES[self.mode].api_key

    def restart(self) -> None:
        """Stop the server if it runs, start it on the same port, and wait until it is healthy."""
        self.stop()
        self._launch()
        self.until_healthy()

    def _launch(self) -> None:
        venv, log_path = self._need_ours()
        port = int(self.base_url.rpartition(":")[2])
        mode = MODES[self.mode]
        run = log_path.parent.parent
        # The cache is one of facts about model classes, for all servers of a run.
        common = {**_inherited(), **_ENVIRONMENT, "VLLM_CACHE_ROOT": str(run / "vllm-cache")}
        forking = template(venv, common, run / "vllm-template.log")
        arguments = mode.vllm_arguments(self.model_dir, port)
        self.process = forking.fork(arguments, {**common, **mode.environment()}, log_path)
        self._watchdog = subprocess.Popen(
            ["sh", "-c", _WATCHDOG, str(self.process.pid)], stdin=subprocess.PIPE, start_new_session=True
        )
        self.killed = False

    def until_healthy(self, *, seconds: float = LONGEST_SECONDS) -> None:
        assert self.process is not None
        deadline = time.monotonic() + seconds
        while not self.is_healthy():
            if self.process.ended():
                self._fail("ended before it answered")
            if time.monotonic() > deadline:
                self.stop()
                self._fail(f"did not answer within {seconds:.0f} s")
            time.sleep(0.1)

    def restartable(self) -> None:
        """Skip the test unless the tests started the server and may kill it."""
        self._need_ours()

    def kill(self) -> None:
        """Kill every process of the server with SIGKILL."""
        self._need_ours()
        self.killed = True
        self._signal_group(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def stop(self) -> None:
        """Interrupt the server with SIGINT; kill the processes that remain after 20 s."""
        self._need_ours()
        if self.process is None:
            return
        if not self.process.ended():
            self.process.send_signal(signal.SIGINT)
            self.process.wait(20)
        self._signal_group(signal.SIGKILL)
        self.process.wait()
        self.process.close()
        self.process = None
        if self._watchdog is not None and self._watchdog.stdin is not None:
            self._watchdog.kill()
            self._watchdog.wait()
            self._watchdog.stdin.close()
            self._watchdog = None

    def is_healthy(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    # States that tests wait for.

    async def metrics(self) -> ServerMetrics:
        return ServerMetrics.parse((await asyncio.to_thread(self.http.get, "/metrics")).raise_for_status().text)

    async def until(
        self, condition: Callable[[ServerMetrics], bool], *, during: asyncio.Future[Any] | None = None
    ) -> None:
        """Wait until the metrics fulfil a condition. It must happen before `during` is done."""
        async with asyncio.timeout(LONGEST_SECONDS):
            while not condition(await self.metrics()):
                assert during is None or not during.done(), f"done before the server was seen in that state: {during}"
                await asyncio.sleep(0.02)

    async def until_generating(self, call: asyncio.Future[Any], before: ServerMetrics, requests: int = 1) -> None:
        """Wait until the server runs the requests of `call` and has generated some tokens since `before`."""
        assert await self._sees_generating(call, before.total(GENERATED) + 10 * requests, requests)

    async def in_flight(
        self, start: Callable[[], Coroutine[Any, Any, Any]], requests: int = 1, *, tokens_each: int = 10
    ) -> asyncio.Task[Any]:
        """Start a call of some requests and return it once the server has generated some tokens of each.

        On a busy machine it may end before that is seen: then it is started again.
        """
        for _ in range(10):
            before = await self.metrics()
            call = asyncio.ensure_future(start())
            if await self._sees_generating(call, before.total(GENERATED) + tokens_each * requests, requests):
                return call
            await call
        raise AssertionError("ten calls ended before the server was seen to generate their tokens")

    async def _sees_generating(self, call: asyncio.Future[Any], tokens: float, requests: int) -> bool:
        """Wait until the server runs the requests and has generated `tokens`; False where the call ends first."""
        await self.until(lambda now: call.done() or (now.running >= requests and now.total(GENERATED) >= tokens))
        return not call.done()

    async def generates_nothing(self, *waiting: asyncio.Future[Any]) -> None:
        """Check that a paused engine generates no token, and that calls wait, during 100 rounds of the engine's loop.

        The engine answers `/is_paused` between two steps: after each answer it would take a step if it could.
        """
        before = (await self.metrics()).total(GENERATED)
        for _ in range(100):
            assert (await asyncio.to_thread(self.http.get, "/is_paused")).json() == {"is_paused": True}
        assert (await self.metrics()).total(GENERATED) == before
        assert not any(call.done() for call in waiting)

    async def until_dead(self) -> None:
        async with asyncio.timeout(LONGEST_SECONDS):
            while await asyncio.to_thread(self.is_healthy):
                await asyncio.sleep(0.05)

    def log_tail(self, lines: int = 30) -> str:
        if self.log_path is None:
            return "(the log of a server that somebody else runs is not known)"
        return "\n".join(self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def _signal_group(self, number: signal.Signals) -> None:
        # The engine is in the session of the server process, also after that process has ended.
        if self.process is not None:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return

    def _need_ours(self) -> tuple[Path, Path]:
        if self.venv is None or self.log_path is None:
            pytest.skip(
                f"{self.base_url} was not started by the tests, which must not kill or restart it; unset VLLM_BASE_URL "
                "to let the tests start one"
            )
        return self.venv, self.log_path

    def _fail(self, what: str) -> NoReturn:
        raise RuntimeError(f"vLLM ({self.mode}) {what}; its log ends:\n{self.log_tail()}")


_given_ports: set[int] = set()


def _free_port() -> int:
    """A free port below those that the system gives to outgoing connections, one of which could take it meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given_ports:  # a server that starts has not bound its port yet
                _given_ports.add(port)
                return port


def _inherited() -> dict[str, str]:
    """Our environment, without what is set for the Python that runs the tests."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV", "VLLM_", "COV_"))
    }
