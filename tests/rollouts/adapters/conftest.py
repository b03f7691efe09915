"""Samples of text, of one image and of several, and trainers' modules where their packages are installed."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from renderers import build_training_sample
from rollouts import WeightSpan
from rollouts.training import TrainingSample, sample_from_rendered

#: A directory with packages installed by `pip install --no-deps --target`: their dependencies need a GPU, or clash.
DIRECTORY = os.environ.get("MMROLLOUTS_TRAINER_PACKAGES", "")


@pytest.fixture(scope="session")
def make_sample(renderer) -> Callable[..., TrainingSample]:
    """A two-turn sample as a policy would have sampled it, with log-probabilities and advantages that all differ."""

    def make(seed: int, images: int = 0, answer: str = "yes", **columns) -> TrainingSample:
        generator = np.random.default_rng(seed)
        squares = [generator.integers(0, 256, (32, 32 * (1 + index), 3), dtype=np.uint8) for index in range(images)]
        parts = [{"type": "image", "image": square} for square in squares[:1]] + [{"type": "text", "text": "Q" * seed}]
        again = [{"type": "image", "image": square} for square in squares[1:]] + [{"type": "text", "text": "And?"}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        messages += [{"role": "user", "content": again}, {"role": "assistant", "content": answer[::-1]}]
        supervised = sample_from_rendered(build_training_sample(renderer, messages), name=f"episode-{seed}/0")
        mask, count = supervised.loss_mask, int(supervised.loss_mask.sum())
        values = {name: np.zeros(len(mask), np.float32) for name in ("logprobs", "advantages")}
        values["logprobs"][mask] = -generator.random(count, dtype=np.float32)
        values["advantages"][mask] = generator.standard_normal(count).astype(np.float32)
        spans = (WeightSpan(f"{seed}", 0, 2), WeightSpan(f"{seed + 1}", 2, count))
        fields = {**values, "media": supervised.media, "weight_spans": spans, "name": supervised.name, **columns}
        return TrainingSample(supervised.token_ids, mask, **fields)

    return make


@pytest.fixture(scope="session")
def model(tiny_model_dir):
    return AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture
def literal_placeholder(make_sample, renderer) -> TrainingSample:
    """A sample with an image in whose answer the policy has sampled a placeholder token."""
    token = next(token for token, kind in renderer.mm_token_type_id_map.items() if kind == 1)
    sample = make_sample(1, images=1)
    sample.token_ids[np.flatnonzero(sample.loss_mask)[1]] = token
    return sample


@pytest.fixture
def load_without_init() -> Iterator[Callable[..., ModuleType]]:
    """Imports a module of `DIRECTORY` without running the __init__ of `packages`, which import a whole trainer."""
    before = dict(sys.modules)

    def load(name: str, *packages: str) -> ModuleType:
        if not DIRECTORY:
            pytest.skip("MMROLLOUTS_TRAINER_PACKAGES is not set (.ci/run sets it)")
        for package in packages:
            module = ModuleType(package)
            module.__path__ = [str(Path(DIRECTORY, *package.split(".")))]
            sys.modules[package] = module
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in ("skyrl", "verl", "ray"):
            del sys.modules[name]


@pytest.fixture
def trainer_packages(monkeypatch) -> str:
    """`DIRECTORY`, whose packages can be imported during the test. It is the last place that is searched.

    The others come first: some trainers bring folders whose names are those of other packages.
    """
    if not DIRECTORY:
        pytest.skip("MMROLLOUTS_TRAINER_PACKAGES is not set (.ci/run sets it)")
    monkeypatch.setattr(sys, "path", [*sys.path, DIRECTORY])
    return DIRECTORY
