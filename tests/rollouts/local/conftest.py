import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from renderers import RenderedTokens
from rollouts.engines.local import LocalEngine
from rollouts.engines.local.batch import RowSampler
from rollouts.testing import tiny_qwen3_vl

#: Tokens that a completion has when `held_batch` holds it.
SPLIT = 6


@pytest.fixture
async def engine(tiny_model_dir: Path) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine.from_pretrained(tiny_model_dir)
    yield engine
    await engine.close()


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_vl(tmp_path_factory.mktemp("other"), seed=7)


@pytest.fixture
def prompt(renderer) -> RenderedTokens:
    image = np.random.default_rng(3).integers(0, 256, (48, 32, 3), dtype=np.uint8)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "Which?"}]
    return renderer.render([{"role": "user", "content": parts}], add_generation_prompt=True)


@pytest.fixture
def held_batch(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Hold the batch after `SPLIT` tokens: returns (event that it is there, event that lets it go on)."""
    reached, released = threading.Event(), threading.Event()
    sample = RowSampler.sample

    def held(self, logits, step):
        result = sample(self, logits, step)
        if step == SPLIT - 1 and not released.is_set():
            reached.set()
            assert released.wait(60)
        return result

    monkeypatch.setattr(RowSampler, "sample", held)
    return reached, released
