"""`rollouts eval` on a real vLLM: as token ids and features, and through its chat completions."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from renderers import load_renderer
from rollouts.cli.main import app
from rollouts.engines.vllm import VLLMEngine
from transport import read_records

SCORING = """\
from pathlib import Path

from PIL import Image


def messages(task):
    picture = Image.open(Path(__file__).parent / task.data["picture"])
    text = {"type": "text", "text": task.data["picture"]}
    return [{"role": "user", "content": [{"type": "image", "image": picture}, text]}]


def score(completion, task):
    return float(completion["content"][0] < "e")
"""

CONFIG = """\
group_size = 2
[tasks]
kind = "jsonl"
path = "tasks.jsonl"
[environment]
kind = "scored_prompt"
messages = "scoring_of_letters.py:messages"
[[environment.rewards]]
name = "score"
function = "scoring_of_letters.py:score"
[sampling]
max_tokens = 12
temperature = 0
extra = {{ allowed_token_ids = {letters} }}
[output]
directory = "{out}"
[engine]
{engine}
"""


@pytest.fixture
async def model(vllm_server):
    async with VLLMEngine(vllm_server.base_url) as engine:
        return (await engine.capabilities()).model


def test_both_doors_of_one_server_give_the_same_texts_and_estimates(vllm_server, model, tmp_path):
    rng = np.random.default_rng(7)
    (tmp_path / "scoring_of_letters.py").write_text(SCORING)
    names = [f"picture{number}.png" for number in range(6)]
    for name in names:
        Image.fromarray(rng.integers(0, 256, (64, 80, 3), dtype=np.uint8)).save(tmp_path / name)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"picture": name}) + "\n" for name in names))
    letters = load_renderer(vllm_server.model_dir).tokenizer.encode_run("abcdefgh").ids
    tokens = f'kind = "vllm"\nbase_url = "{vllm_server.base_url}"\n[renderer]\nmodel = "{vllm_server.model_dir}"'
    chat = f'kind = "openai"\nbase_url = "{vllm_server.base_url}/v1"\nmodel = "{model}"'
    results, texts, counts = {}, {}, {}
    for out, engine in {"tokens": tokens, "chat": chat}.items():
        config = tmp_path / f"{out}.toml"
        config.write_text(CONFIG.format(letters=letters, out=out, engine=engine))
        ended = CliRunner().invoke(app, ["eval", str(config)])
        assert ended.exit_code == 0, ended.output
        results[out] = json.loads((tmp_path / out / "results.json").read_text())
        episodes = [one for group in read_records(tmp_path / out / "trajectories.mmr") for one in group]
        texts[out] = {one.episode_id: one.turns[0].message["content"] for one in episodes}
        counts[out] = {one.has_tokens for one in episodes}
    assert texts["tokens"] == texts["chat"]
    assert len(set(texts["chat"].values())) > 1, texts
    assert counts == {"tokens": {True}, "chat": {False}}
    assert 0 < results["chat"]["pass_at_k"]["1"]["value"] < 1, texts  # so that equal estimates say something
    for key in ("total_reward", "pass_at_k", "pass_hat_k", "tokens", "sampled_tokens"):
        assert results["tokens"][key] == results["chat"][key]
