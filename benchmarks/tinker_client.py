"""A client of the Tinker API that measures a server; runs with any version of the package `tinker`.

    python benchmarks/tinker_client.py BASE_URL MODEL ROUNDS

Prints one line of JSON: the seconds of each round of `forward_backward` and of `optim_step`, and the tokens per second
of each round of sampling, after two rounds that are not counted. `tinker_server.py` runs it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import tinker
from tinker import types

ROWS, ROW_TOKENS = 64, 512
SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 64, 32, 128
RANK = 32
WARM_UP = 2


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
            types.SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, seed=seed + number),
        )
        for number, prompt in enumerate(prompts()[: SAMPLES // samples])
    ]  # fmt: skip
    return sum(len(sequence.tokens) for future in futures for sequence in future.result().sequences)


def main(base_url: str, model: str, rounds: str) -> None:
    service = tinker.ServiceClient(base_url=base_url, api_key="tml-benchmark")
    training = training_client(service, model)
    data = [datum(*row) for row in rows()]
    figures: dict[str, list[float]] = {"forward_backward": [], "optim_step": [], "tokens_per_second": []}
    for _ in range(int(rounds) + WARM_UP):
        started = time.perf_counter()
        training.forward_backward(data, "cross_entropy").result()
        computed = time.perf_counter()
        training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        figures["forward_backward"].append(computed - started)
        figures["optim_step"].append(time.perf_counter() - computed)
    sampling = sampling_client(training, "measured")
    for number in range(int(rounds) + WARM_UP):
        started = time.perf_counter()
        count = sampled_tokens(sampling, 1000 * number)
        figures["tokens_per_second"].append(count / (time.perf_counter() - started))
    print(json.dumps({name: values[WARM_UP:] for name, values in figures.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
