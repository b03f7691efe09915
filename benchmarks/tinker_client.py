"""A client of the Tinker API that measures a server; runs with any version of the package `tinker`.

    python benchmarks/tinker_client.py BASE_URL MODEL

Each line of its input names a call, `forward_backward`, `optim_step` or `sampling`, and a round. The answer is a line
with the seconds of that call. `tinker_server.py` runs a client for each of two servers.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import tinker
from tinker import types

ROWS, ROW_TOKENS = 64, 512
SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 64, 32, 128
RANK = 32
#: Samples of a prompt.
GROUP = 8


def rows(rows: int = ROWS, tokens: int = ROW_TOKENS) -> list[tuple[list[int], list[int]]]:
    """Token ids and targets: bytes that follow no rule, the same in every process."""
    ids = [[(31 * row + token * token) % 251 for token in range(tokens + 1)] for row in range(rows)]
    return [(row[:-1], row[1:]) for row in ids]


def prompts() -> list[list[int]]:
    return [[(7 * number + token) % 251 for token in range(PROMPT_TOKENS)] for number in range(SAMPLES)]


def datum(tokens: list[int], targets: list[int]) -> types.Datum:
    inputs: Any = {"target_tokens": targets, "weights": [1.0] * len(targets)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def training_client(service: tinker.ServiceClient, model: str, rank: int = RANK, **options: Any) -> Any:
    return _made(service.create_lora_training_client(base_model=model, rank=rank, **options))


def sampling_client(training: Any, name: str) -> Any:
    """Of the present weights."""
    path = training.save_weights_for_sampler(name).result().path
    return _made(training.create_sampling_client(path))


def _made(client: Any) -> Any:
    """A client: versions from 0.30 on return a future of it."""
    return client.result() if hasattr(client, "result") else client


def sampled_tokens(sampling: Any, seed: int, samples: int = 1) -> int:
    """The number of tokens of so many samples of each prompt, 64 in all, requested at once."""
    futures = [
        sampling.sample(
            types.ModelInput.from_ints(prompt), samples,
            types.SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, seed=seed + number, stop=[]),
        )
        for number, prompt in enumerate(prompts()[: SAMPLES // samples])
    ]  # fmt: skip
    return sum(len(sequence.tokens) for future in futures for sequence in future.result().sequences)


def main(base_url: str, model: str) -> None:
    service = tinker.ServiceClient(base_url=base_url, api_key="tml-benchmark")
    training = training_client(service, model)
    sampling = sampling_client(training, "measured")
    data = [datum(*row) for row in rows()]
    calls: dict[str, Callable[[int], object]] = {
        "forward_backward": lambda _: training.forward_backward(data, "cross_entropy").result(),
        "optim_step": lambda _: training.optim_step(types.AdamParams(learning_rate=1e-4)).result(),
        "sampling": lambda number: sampled_tokens(sampling, 1000 * number, GROUP),
    }
    for line in sys.stdin:
        call, number = line.split()
        started = time.perf_counter()
        calls[call](int(number))
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
