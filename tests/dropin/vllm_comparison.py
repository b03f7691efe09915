"""Plays a verifiers environment with images on one real vLLM, with PyPI's `renderers` and with this project.

    tests/real/setup_vllm.sh                   # once; 2.5 GB
    python tests/dropin/vllm_comparison.py

Both sides are verifiers 0.4.0 with its own `TrainClient`, each in its own environment (made if it is not there); they
play the same tasks with the same seeds, one after the other. A proxy counts the bytes that they send; transformers
computes the log-probabilities of the sampled tokens again. Prints a table, and returns 1 if this project's side sends
more than 1.1 times the data of each image once, has a mismatch of 1e-4 or more, renders other tokens than PyPI's, or
has failed rollouts. Needs the project's `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np
from counting_proxy import CountingProxy, Sent
from environments import Environment, InstallError, Package

_TESTS = Path(__file__).resolve().parents[1]
MOST_TIMES_EACH_IMAGE = 1.1
MOST_MISMATCH = 1e-4

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Side:
    """What one package did. records: verifiers' traces. mismatches: float32 (sampled tokens,), absolute, in nats."""

    records: Sequence[Record]
    sent: Sent
    mismatches: np.ndarray

    @property
    def failed(self) -> list[str]:
        """Why rollouts failed."""
        return [str(record["errors"] or "not ended") for record in self.records if not record["ok"]]

    @property
    def rendered(self) -> list[list[int]]:
        """The tokens that were rendered for each turn: those of its prompt behind what was sampled before."""
        turns = []
        for tokens in map(_tokens, self.records):
            runs = [(sampled, [token for token, _ in run]) for sampled, run in groupby(tokens, itemgetter(1))]
            turns += [run for sampled, run in runs if not sampled]
        return turns

    @property
    def tokens(self) -> list[list[int]]:
        """All tokens of each rollout, sampled ones too."""
        return [[token for token, _ in _tokens(record)] for record in self.records]


def _tokens(record: Record) -> list[tuple[int, bool]]:
    """The tokens of a rollout, each with whether it was sampled."""
    return [pair for node in record["nodes"] for pair in zip(node["token_ids"], node["mask"], strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=8)
    rollouts = parser.parse_args().rollouts
    for package in get_args(Package):
        Environment("verifiers-0.4.0", package).prepare()
    with tempfile.TemporaryDirectory() as scratch:
        sides = asyncio.run(_play_both(Path(scratch), rollouts))
    print(table(sides["stock"], sides["ours"]))
    found = list(violations(sides["stock"], sides["ours"]))
    for line in found:
        print(line)
    return 1 if found else 0


async def _play_both(scratch: Path, rollouts: int) -> dict[Package, Side]:
    sys.path.append(str(_TESTS / "real"))
    from make_checkpoint import make_checkpoint
    from vllm_server import VLLMServer

    directory = make_checkpoint(scratch / "checkpoint")
    logs = scratch / "logs"
    logs.mkdir()
    played = {}
    server = await asyncio.to_thread(VLLMServer.start, _vllm_environment(), directory, "float32", logs)
    try:
        for package in get_args(Package):
            # The server keeps images that it has been sent: each side begins with an empty cache.
            server.http.post("/reset_mm_cache").raise_for_status()
            server.http.post("/reset_prefix_cache").raise_for_status()
            async with CountingProxy(server.base_url, names_tokens_by_text=package == "stock") as proxy:
                file = scratch / f"{package}.json"
                await _play(package, proxy.url, server.model_name, directory, rollouts, file)
            played[package] = json.loads(file.read_text(encoding="utf-8")), proxy.sent
    finally:
        await asyncio.to_thread(server.stop)
    return {package: Side(records, sent, mismatches(records, directory)) for package, (records, sent) in played.items()}


async def _play(package: Package, url: str, model: str, directory: Path, rollouts: int, file: Path) -> None:
    player = Path(__file__).with_name("vllm_player.py")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    child = await asyncio.create_subprocess_exec(
        *map(str, [Environment("verifiers-0.4.0", package).python, player, url, model, directory, rollouts, file]),
        cwd=directory,
        env={**variables, "PYTHONPATH": str(_TESTS / "environments"), "HF_HUB_OFFLINE": "1"},
    )
    if await child.wait():
        raise SystemExit(f"verifiers with the package of {package} ended with status {child.returncode}")


def _vllm_environment() -> Path:
    """The directory of the environment with vLLM, made if it is not there."""
    setup = subprocess.run([_TESTS / "real" / "setup_vllm.sh"], check=True, stdout=subprocess.PIPE, text=True)
    return Path(setup.stdout.strip())


def mismatches(records: Sequence[Record], directory: Path) -> np.ndarray:
    """float32 (sampled tokens of all rollouts,): differences from the log-probabilities by transformers, in nats."""
    import torch
    from transformers import AutoModelForImageTextToText

    from renderers import load_renderer
    from rollouts.training import TrainingBatch, token_logprobs

    renderer = load_renderer(directory)
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    differences = []
    for record in records:
        batch = TrainingBatch.from_samples([_sample_of(record, renderer)], pad_id=0)
        with torch.inference_mode():
            difference = (token_logprobs(model, batch) - batch.logprobs).abs()
        differences.append(difference[batch.loss_mask].numpy())
    return np.concatenate(differences)


def _sample_of(record: Record, renderer: Any) -> Any:
    """The one branch of a trace as a `TrainingSample`. The pixels are computed again of the images in its messages."""
    from renderers import PlaceholderRange
    from renderers.media.reference import load_source
    from renderers.messages import media_parts
    from rollouts.training import TrainingSample

    processor = renderer.processors["image"]
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    media = []
    for number, node in enumerate(record["nodes"]):
        assert node["parent"] == (number - 1 if number else None), "a rollout of this taskset has one branch"
        images = (index for index, token in enumerate(node["token_ids"]) if token in renderer.mm_token_type_id_map)
        end = 0
        for _, part in media_parts(node["message"]):
            item = processor.process(load_source(part, processor.policy, processor.store))
            start = next(index for index in images if index >= end)
            end = start + item.num_tokens
            media.append((item, PlaceholderRange(len(ids) + start, item.num_tokens)))
        of_sampled = iter(node.get("logprobs") or ())
        ids += node["token_ids"]
        mask += node["mask"]
        logprobs += [next(of_sampled) if sampled else 0.0 for sampled in node["mask"]]
    return TrainingSample(
        np.array(ids, np.int32),
        np.array(mask),
        np.array(logprobs, np.float32),
        np.ones(len(ids), np.float32),
        tuple(media),
    )


def table(stock: Side, ours: Side) -> str:
    """The figures of both sides and what this project's must reach."""
    rows = [["", "PyPI renderers", "mmrollouts", "must reach"]]
    limits = {
        "largest mismatch, nats": f"< {MOST_MISMATCH:.0e}",
        "x each image once": f"<= {MOST_TIMES_EACH_IMAGE}",
        "failed rollouts": "0",
    }
    figures = [_figures(side) for side in (stock, ours)]
    rows += [[name, value, figures[1][name], limits.get(name, "")] for name, value in figures[0].items()]
    rows.append(["turns with equal rendered tokens", "", _equal(stock.rendered, ours.rendered), "all"])
    rows.append(["rollouts with equal tokens, sampled ones too", "", _equal(stock.tokens, ours.tokens), ""])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def _equal(stock: Sequence[list[int]], ours: Sequence[list[int]]) -> str:
    return f"{sum(map(list.__eq__, stock, ours))} of {len(stock)}"


def _figures(side: Side) -> dict[str, str]:
    return {
        "rollouts": str(len(side.records)),
        "failed rollouts": str(len(side.failed)),
        "requests": str(side.sent.requests),
        "distinct images": str(len(side.sent.images)),
        "images sent": str(side.sent.images.total()),
        "bytes sent": f"{side.sent.bytes:,}",
        "x each image once": f"{side.sent.times_each_image_once():.3f}",
        "sampled tokens": str(side.mismatches.size),
        "mean mismatch, nats": f"{side.mismatches.mean():.1e}",
        "largest mismatch, nats": f"{side.mismatches.max():.1e}",
    }


def violations(stock: Side, ours: Side) -> Iterator[str]:
    """What this project's side does not reach, a line each."""
    for reason in ours.failed:
        yield f"a rollout failed: {reason}"
    if ours.sent.times_each_image_once() > MOST_TIMES_EACH_IMAGE:
        yield f"{ours.sent.bytes} bytes are {ours.sent.times_each_image_once():.3f}x the data of each image once"
    if not ours.mismatches.size:
        yield "no token was sampled"
    elif not ours.mismatches.max() < MOST_MISMATCH:
        yield f"the largest mismatch is {ours.mismatches.max():.1e} nats"
    if stock.rendered != ours.rendered:
        pairs = zip(stock.rendered, ours.rendered, strict=False)
        differing = [turn for turn, (theirs, own) in enumerate(pairs) if theirs != own]
        yield (
            f"PyPI's renderers rendered {len(stock.rendered)} turns, this project {len(ours.rendered)}; other tokens "
            f"in {len(differing)}, the first of them: {differing[:5]}"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InstallError as error:
        sys.exit(f"InstallError: {error}")
