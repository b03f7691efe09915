"""What `rollouts tinker` adds to its trainer and its engine, and the server of SkyRL beside it on a text model.

    python benchmarks/tinker_server.py [--check] [--rounds 9] [--skyrl]

Called so and not `tinker.py`, which would be imported in place of the package `tinker`. The server is a process of its
own, the clients are those of the package `tinker`; a side that waits uses no CPU. torch has one thread.

- `forward_backward` of 64 rows of 512 tokens through the server, and by a `Trainer` in this process, in alternation.
- 64 samples at once from an adapter, of 8 prompts and of 64: through the server, and by a `LocalEngine` in this
  process. Of a model of 18 M parameters, to which the target applies, and of one of 0.1 M, which shows what a request
  costs: it samples a token in the time that a request takes to be sent.
- The memory of the server's process for each adapter that waits, and the size of what must be there: its parameters,
  and two values of AdamW for each.
- With `--skyrl`: `skyrl.tinker.api` 0.3.0 with its JAX backend on the CPU, in rounds that alternate with ours, by the
  same client script in an environment of its own, which is made in the user's cache if it is missing (6 GB). A core for
  each server, another one for the clients. SkyRL's client is tinker 0.22.7: its server does not read the protobuf
  messages of newer ones. It starts its engine with `uv run` in a project's directory; here a program of that name
  starts the same module. Where Python is older than 3.12, `typing.TypedDict` is that of typing_extensions, without
  which pydantic refuses its types.

`--check` fails where a target is missed.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tinker
import torch
from tinker import types
from tinker_client import (
    NEW_TOKENS,
    RANK,
    SAMPLES,
    datum,
    prompts,
    rows,
    sampled_tokens,
    sampling_client,
    training_client,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollouts.engines.local import LocalEngine
from rollouts.engines.protocol import GenerateRequest, SamplingParams
from rollouts.observability.training_log import TRAINING_FILE
from rollouts.testing import tiny_qwen3_vl
from rollouts.training.trainer import Datum, LoraOptions, Trainer

T = TypeVar("T")
SKYRL = ("skyrl[tinker,jax]==0.3.0",)
SKYRL_CLIENT = "tinker==0.22.7"
START_SECONDS = 180
#: The targets: of the overhead one of the two, sampling, memory of an adapter.
OVERHEAD, OVERHEAD_SECONDS, SAMPLING, MEMORY = 0.05, 0.010, 0.9, 1.15
IDLE_RANK, IDLE_ADAPTERS = 128, 16

_UV = """#!{python}
import subprocess, sys
sys.exit(subprocess.call([sys.executable, *sys.argv[sys.argv.index("-m"):]]))
"""
_TYPED_DICT = "import typing, typing_extensions\ntyping.TypedDict = typing_extensions.TypedDict\n"


def tiny_qwen3(directory: Path, *, width: int = 64, layers: int = 2) -> Path:
    """A text model that both servers read, with a token for each byte: 0.1 M parameters, with 512 and 8, 18 M."""
    tiny_qwen3_vl(directory, weights=False)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        (directory / name).unlink()
    config = Qwen3Config(
        vocab_size=288,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        max_position_embeddings=4096,
        eos_token_id=258,
        pad_token_id=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@contextmanager
def our_server(model: Path, directory: Path) -> Iterator[tuple[str, int]]:
    """The address and the process of `rollouts tinker`."""
    program = [sys.executable, "-c", "from rollouts.cli.main import main; main()", "tinker"]
    options = ["--model", str(model), "--run", str(directory), "--port", "0"]
    process = subprocess.Popen([*program, *options], stdout=subprocess.PIPE, text=True, env=_environment(os.environ))
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r" at (http://\S+)", line)
        if match is None:
            raise SystemExit(f"the server has not started: {line}")
        yield match[1], process.pid
    finally:
        process.terminate()
        process.wait()


@contextmanager
def skyrl_server(python: Path, model: Path, directory: Path) -> Iterator[tuple[str, int]]:
    """The address of SkyRL's server, once it computes, and its process, which leads a session."""
    (directory / "bin").mkdir(parents=True)
    (directory / "bin" / "uv").write_text(_UV.format(python=python))
    (directory / "bin" / "uv").chmod(0o755)
    (directory / "sitecustomize.py").write_text(_TYPED_DICT if sys.version_info < (3, 12) else "")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [directory / "bin" / "uv", "run", "-m", "skyrl.tinker.api", "--base-model", model, "--backend", "jax"]
    command += [
        "--backend-config",
        json.dumps({"max_lora_adapters": 2, "max_lora_rank": RANK, "sample_max_num_sequences": SAMPLES}),
    ]
    command += ["--checkpoints-base", directory / "checkpoints", "--database-url", f"sqlite:///{directory}/tinker.db"]
    command += ["--host", "127.0.0.1", "--port", port]
    path = f"{directory / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = _environment(os.environ, PATH=path, PYTHONPATH=str(directory), JAX_PLATFORMS="cpu")
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/api/v1/healthz", process, directory / "log")
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(base: Any, **changes: str) -> dict[str, str]:
    return {**base, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1", **changes}


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise SystemExit(f"SkyRL's server has not started:\n{log.read_text(errors='replace')[-3000:]}")


def install_skyrl() -> Path:
    """The Python of the environment with SkyRL and a client that it understands, made if it is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    directory = cache / "mmrollouts-benchmarks" / f"skyrl-0.3.0-{version}"
    complete = directory / "complete"  # written last: an interrupted installation is repeated
    if not complete.is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
        subprocess.run([directory / "bin" / "python", "-m", "pip", "install", "--quiet", *SKYRL], check=True)
        subprocess.run([directory / "bin" / "python", "-m", "pip", "install", "--quiet", SKYRL_CLIENT], check=True)
        complete.touch()
    return directory / "bin" / "python"


def alternated(rounds: int, *calls: Callable[[int], T]) -> list[list[T]]:
    """The result of each call in each round, after two rounds that are not counted."""
    found = [[call(number) for call in calls] for number in range(rounds + 2)]
    return [list(column) for column in zip(*found[2:], strict=True)]


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def training_overhead(service: tinker.ServiceClient, model: Path, run: Path, rounds: int) -> tuple[float, float, float]:
    """Seconds of `forward_backward` by a trainer here, the same in the server, and what the client waits beyond that.

    The last is of the same call as the second, which the server records, so that other programs disturb it less.
    """
    trainer = Trainer.from_pretrained(model, device="cpu")
    trainer.create_model("a", lora=LoraOptions(rank=RANK, seed=0))
    ones = np.ones(len(rows()[0][0]), np.float32)
    own = [Datum(np.array(ids), np.array(targets), {"weights": ones}) for ids, targets in rows()]
    training = training_client(service, str(model), seed=0)
    sent = [datum(*row) for row in rows()]
    loss = {"trainer": 0.0, "server": 0.0}
    waited: list[float] = []

    def by_trainer(_: int) -> float:
        return seconds(lambda: loss.update(trainer=_sum(trainer.forward_backward("a", own, "cross_entropy"))))

    def by_server(_: int) -> float:
        waited.append(
            seconds(lambda: loss.update(server=_sum(training.forward_backward(sent, "cross_entropy").result())))
        )
        computed = seconds(lambda: training.optim_step(types.AdamParams(learning_rate=0.0)).result())
        line = (run / training.model_id / TRAINING_FILE).read_text().splitlines()[-1]
        # The line has the time of both calls; that of the step is the smaller part of what it took here.
        return json.loads(line)["metrics"]["seconds"] - computed

    alone, through = alternated(rounds, by_trainer, by_server)
    assert abs(loss["server"] / loss["trainer"] - 1) < 1e-5, loss
    return min(alone), min(through), float(np.median(np.subtract(waited[2:], through)))


def _sum(result: Any) -> float:
    value: float = result.metrics["loss:sum"]
    return value


def sampling_rates(
    service: tinker.ServiceClient, model: Path, run: Path, rounds: int
) -> dict[int, tuple[float, float]]:
    """Tokens per second of the engine alone and through the server, for 8 samples of a prompt and for one.

    Both sample from one adapter. The best of all rounds: other programs on the machine only slow one down.
    """
    training = training_client(service, str(model), seed=0, train_unembed=False)
    sampling = sampling_client(training, "sampled")
    adapter = run / training.model_id / "sampler_weights" / "sampled"

    def request(prompt: list[int], seed: int, samples: int) -> GenerateRequest:
        return GenerateRequest(prompt, SamplingParams(max_tokens=NEW_TOKENS, seed=seed, n=samples), adapter="a")

    with asyncio.Runner() as runner:
        engine = LocalEngine.from_pretrained(model)
        runner.run(engine.load_adapter("a", adapter))

        async def generate(seed: int, samples: int) -> int:
            chosen = enumerate(prompts()[: SAMPLES // samples])
            calls = [engine.generate(request(prompt, seed + number, samples)) for number, prompt in chosen]
            results = await asyncio.gather(*calls)
            return sum(len(completion.token_ids) for result in results for completion in result.completions)

        def rate(call: Callable[[], int]) -> float:
            started = time.perf_counter()
            count = call()
            return count / (time.perf_counter() - started)

        def rates(samples: int) -> tuple[float, float]:
            alone, through = alternated(
                rounds,
                lambda number: rate(lambda: runner.run(generate(1000 * number, samples))),
                lambda number: rate(lambda: sampled_tokens(sampling, 1000 * number, samples)),
            )
            return max(alone), max(through)

        found = {samples: rates(samples) for samples in (8, 1)}
        runner.run(engine.close())
    return found


def report_sampling(model: str, sampled: dict[int, tuple[float, float]]) -> None:
    for samples, (engine, through) in sampled.items():
        print(f"sampling, {model}, {SAMPLES // samples} prompts at once, {samples} samples each:")
        print(f"  {engine:,.0f} tokens/s, through the server {through:,.0f}, {through / engine:.2f}x")


def idle_adapter(service: tinker.ServiceClient, model: Path, run: Path, process: int) -> tuple[float, float]:
    """Bytes by which the server's process grows for an adapter that has had a step, and bytes that it must keep."""
    row = datum(*rows(1, 8)[0])

    def add() -> Any:
        training = training_client(service, str(model), rank=IDLE_RANK)
        training.forward_backward([row], "cross_entropy").result()
        training.optim_step(types.AdamParams()).result()
        return training

    kept = [add() for _ in range(3)]
    kept[0].save_weights_for_sampler("size").result()
    size = (run / kept[0].model_id / "sampler_weights" / "size" / "adapter_model.safetensors").stat().st_size
    before = _resident(process)
    kept += [add() for _ in range(IDLE_ADAPTERS)]
    return (_resident(process) - before) / IDLE_ADAPTERS, 3 * size


def _resident(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text("ascii")
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


CALLS = ("forward_backward", "optim_step", "sampling")
#: A call by its name in a round: its seconds, and the CPU seconds of the server.
Measure = Callable[[str, int], tuple[float, float]]


@contextmanager
def measured_server(python: Path, server: tuple[str, int], model: Path) -> Iterator[Measure]:
    """A process of `tinker_client.py` in an environment, for a server that runs: its address and its process."""
    base_url, pid = server
    process = subprocess.Popen(
        [python, Path(__file__).with_name("tinker_client.py"), base_url, model],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=_environment({name: value for name, value in os.environ.items() if name != "PYTHONPATH"}),
    )  # fmt: skip
    requests, answers = process.stdin, process.stdout
    assert requests is not None
    assert answers is not None

    def measure(call: str, number: int) -> tuple[float, float]:
        before = _cpu_seconds(pid)
        requests.write(f"{call} {number}\n")
        requests.flush()
        if not (answer := answers.readline()):
            raise SystemExit(f"the client of {base_url} has ended")
        return float(answer), _cpu_seconds(pid) - before

    try:
        yield measure
    finally:
        requests.close()
        process.wait()


def _cpu_seconds(pid: int) -> float:
    """Of a process and of those that it has started."""
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text("ascii", "replace").rpartition(")")[2].split()
            if int(stat.parent.name) == pid or int(fields[3]) == pid:  # of its session
                found += sum(map(int, fields[11:13]))
    return found / os.sysconf("SC_CLK_TCK")


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Processes that the block starts run on one core, so that neither server has more threads at work."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[core % len(cores)]])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    parser.add_argument("--skyrl", action="store_true", help="measure SkyRL's server, too")
    options = parser.parse_args()
    missed = []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        model, run = tiny_qwen3(Path(name) / "model"), Path(name) / "run"
        with our_server(model, run) as (url, process):
            service = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
            alone, inside, added = training_overhead(service, model, run, options.rounds)
            limit = f"at most {OVERHEAD:.0%} or {1000 * OVERHEAD_SECONDS:.0f} ms"
            print(
                f"forward_backward, 64 x 512 tokens: a trainer here {alone:.3f} s, the one of the server {inside:.3f} s"
            )
            print(f"  the client waits {1000 * added:.1f} ms longer, {added / inside:.1%} ({limit})")
            if added > max(OVERHEAD * inside, OVERHEAD_SECONDS):
                missed.append("forward_backward")
            sampled = sampling_rates(service, model, run, options.rounds)
            report_sampling("0.1 M parameters", sampled)
            service.close("success").result()
        larger = tiny_qwen3(Path(name) / "larger", width=512, layers=8)
        with our_server(larger, run) as (url, _):
            service = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
            sampled = sampling_rates(service, larger, run, options.rounds)
            report_sampling("18 M parameters", sampled)
            missed += [f"sampling of {each}" for each, (alone, ours) in sampled.items() if ours < SAMPLING * alone]
            service.close("success").result()
        with our_server(model, run) as (url, process):  # another one: freed memory of the first would hide what grows
            service = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
            grown, needed = idle_adapter(service, model, run, process)
            print(f"parameters and state of AdamW of an adapter of rank {IDLE_RANK}: {needed / 1e6:.2f} MB")
            print(f"  the process grows by {grown / 1e6:.2f} MB, {grown / needed:.2f}x (at most {MEMORY}x)")
            if grown > MEMORY * needed:
                missed.append("memory")
            service.close("success").result()
        if options.skyrl:
            beside_skyrl(model, Path(name), options.rounds)
    if options.check and missed:
        sys.exit(f"missed: {', '.join(missed)}")


def beside_skyrl(model: Path, directory: Path, rounds: int) -> None:
    """Each call in rounds that alternate between two servers, on one core each."""
    python = install_skyrl()
    with ExitStack() as running:
        with on_core(0):
            ours = running.enter_context(our_server(model, directory / "beside"))
            skyrl = running.enter_context(skyrl_server(python, model, directory / "skyrl"))
        with on_core(1):
            sides = ((Path(sys.executable), ours), (python, skyrl))
            measures = [running.enter_context(measured_server(*side, model)) for side in sides]

        def measured(side: int, number: int) -> list[tuple[float, float]]:
            return [measures[side](call, number) for call in CALLS]

        found = alternated(rounds, partial(measured, 0), partial(measured, 1))
    own, other = (np.median(side, axis=0) for side in found)
    print(f"{'medians, s (CPU of the server, s)':36}{'rollouts tinker':>20}{'SkyRL 0.3.0':>20}")
    for call, mine, theirs in zip(CALLS, own, other, strict=True):
        cells = "".join(f"{f'{seconds:.3f} ({cpu:.2f})':>20}" for seconds, cpu in (mine, theirs))
        print(f"{call:36}{cells}{theirs[0] / mine[0]:9.2f}x ({theirs[1] / max(mine[1], 0.01):.2f}x)")


if __name__ == "__main__":
    main()
