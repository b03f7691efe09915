"""Episodes with sounds on a real server: its log-probabilities are those of transformers on the trajectory."""

import functools
import io
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch

from renderers import load_renderer
from renderers.media.audio_decoding import decode_audio
from renderers.media.samples import samples_source
from rollouts import GenerateRequest, SamplingParams, StepResult
from rollouts.engines.vllm import ServerRenderer, VLLMEngine
from rollouts.episodes.episode import EpisodeSpec, run_episodes
from rollouts.models.loading import load_model
from rollouts.training import TrainingBatch, mismatch_report, samples_from_trajectory, token_logprobs

TURNS = 3
CLOSE, FAR = 1e-4, 1e-3
SEES = {"qwen2.5-omni", "qwen3-omni"}
# vLLM's tower pads the chunks of a second to the longest of the sounds that it encodes together, and transformers' to a
# second: a shorter sound that is encoded alone has other features (log-probabilities 2e-3 apart).
OF_A_SECOND = {"qwen3-omni", "qwen3-asr"}
# vLLM processes one file in a prompt, or counts the frames of a file in another way (Qwen3-Omni), which is an error.
AS_FEATURES = {"audio-flamingo3", "glm-asr", "qwen3-omni"}
RATES = (8_000, 16_000, 44_100)

_SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3-omni", "qwen3-asr", "glm-asr")]
on_families = pytest.mark.parametrize(
    "vllm_server", ["qwen2-audio", "qwen2.5-omni", "audio-flamingo3", *_SLOW], indirect=True, scope="session"
)


class Radio:
    """Plays 0 to 3 new sounds a turn, and shows pictures to a model that sees; seeds decide, and `salt` the samples."""

    def __init__(self, *, sees, shortest=0.05, salt=0):
        self.sees, self.shortest, self.salt = sees, shortest, salt

    def reset(self, seed: int):
        self.random = np.random.default_rng(seed)  # what follows is the same for all salts, but for the samples
        self.samples = np.random.default_rng((seed, self.salt))
        self.turn = 0
        return [{"role": "user", "content": [*self._sounds(), {"type": "text", "text": "What is this?"}]}]

    def step(self, message):
        self.turn += 1
        content = [
            *self._pictures(),
            *self._sounds(),
            {"type": "text", "text": "<|AUDIO|> is text here"},
            *self._sounds(),
        ]
        return StepResult([{"role": "user", "content": content}], reward=0.0, done=self.turn == TURNS)

    def _sounds(self):
        for _ in range(self.random.integers(0, 3)):
            rate, channels = int(self.random.choice(RATES)), int(self.random.integers(1, 3))
            count = int(rate * self.random.uniform(self.shortest, 1.5))
            samples = self.samples.uniform(-0.5, 0.5, (count, channels)).astype(np.float32)
            if self.random.random() < 0.5:
                yield {"type": "audio", "audio": samples, "sampling_rate": rate}
                continue
            file = io.BytesIO()
            soundfile.write(file, samples, rate, format=str(self.random.choice(["WAV", "FLAC", "OGG"])))
            yield {"type": "audio", "audio": file.getvalue()}

    def _pictures(self):
        for _ in range(self.random.integers(0, 2) if self.sees else 0):
            yield {"type": "image", "image": self.random.integers(0, 256, (64, 96, 3), dtype=np.uint8)}


@functools.cache
def loaded(directory):
    return load_renderer(directory), load_model(directory)


async def episodes(server, seeds, *, media="auto", salt=0):
    """Trajectories, and what the server was sent of their media."""
    renderer, _ = loaded(server.model_dir)
    async with VLLMEngine(server.base_url, media=media) as engine:
        trajectories = await run_episodes(
            lambda: Radio(sees=server.mode in SEES, shortest=1.0 if server.mode in OF_A_SECOND else 0.05, salt=salt),
            [EpisodeSpec(seed, sampling_seed=seed) for seed in seeds],
            engine=engine,
            renderer=renderer,
            sampling=SamplingParams(max_tokens=12, extra={"ignore_eos": True}),
            max_turns=TURNS,
        )
        return trajectories, engine.media_cache_counts


class Reversed:
    """Makes the items of sounds that are played backwards, under the names of the sounds."""

    def __init__(self, processor):
        self._processor = processor

    def process(self, source):
        samples = decode_audio(source, self._processor.policy, 16_000)
        backwards = samples_source(samples[::-1].copy(), 16_000, self._processor.policy)
        item = self._processor.process(backwards)
        return replace(item, mm_hash=self._processor.mm_hash(source), source=source)


def largest_difference(server, trajectories, *, backwards=False):
    renderer, model = loaded(server.model_dir)
    processors = dict(renderer.processors)
    if backwards:
        processors["audio"] = Reversed(processors["audio"])
    largest = 0.0
    for trajectory in trajectories:
        samples = samples_from_trajectory(trajectory, advantage=1.0, processors=processors)
        batch = TrainingBatch.from_samples(samples, pad_id=0)
        with torch.inference_mode():
            largest = max(largest, mismatch_report(batch, token_logprobs(model, batch)).max_abs)
    return largest


@on_families
@pytest.mark.parametrize("media", ["features", "content_parts"])
async def test_log_probabilities_of_episodes_with_sounds_are_those_of_transformers(vllm_server, media):
    """Both ways of sending a sound, and each sound once; with sounds played backwards the test fails."""
    if media == "content_parts" and vllm_server.mode in AS_FEATURES:
        pytest.skip("vLLM's processor of this model does not take these files")
    trajectories, sent = await episodes(vllm_server, range(2), media=media, salt=len(media))
    sounds = {one.source.digest for each in trajectories for one in each.all_media() if one.modality == "audio"}
    items = {one.source.digest for each in trajectories for one in each.all_media()}
    assert len(sounds) > 5
    assert sent.included_items == len(items)
    assert sent.omitted_items > 0
    assert largest_difference(vllm_server, trajectories) < CLOSE
    assert largest_difference(vllm_server, trajectories, backwards=True) > FAR


@on_families
async def test_what_the_server_renders_gives_the_completion_that_the_renderer_gives(vllm_server):
    renderer, _ = loaded(vllm_server.model_dir)
    samples = np.random.default_rng().uniform(-0.5, 0.5, 16_000).astype(np.float32)
    sound = {"type": "audio", "audio": samples, "sampling_rate": 16_000}
    conversation = [{"role": "user", "content": [sound, {"type": "text", "text": "?"}]}]
    async with ServerRenderer.connect(vllm_server.base_url) as served, VLLMEngine(vllm_server.base_url) as engine:
        own, theirs = renderer.render(conversation), await served.render(conversation)
        assert theirs.token_ids == own.token_ids
        requests = [
            GenerateRequest(each.token_ids, SamplingParams(max_tokens=8, temperature=0.0), each.multi_modal_data)
            for each in (own, theirs)
        ]
        mine, other = [(await engine.generate(each)).completions[0] for each in requests]
    assert mine.token_ids.tolist() == other.token_ids.tolist()
    assert np.abs(mine.logprobs - other.logprobs).max() < CLOSE
