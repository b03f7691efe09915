"""Videos with the sound inside of them: log-probabilities, positions, batches and episodes are those of the model."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from family_rows import COMPLETION, RATE, loaded_family
from films import Film, film, inputs_of
from PIL import Image
from test_model_architectures import LAYOUTS, assert_same_gradients, close, of_samples, stock_equals_ours
from trajectory_files import file_of

from renderers import build_training_sample, load_renderer
from rollouts import LocalEngine, SamplingParams, StepResult, run_episode
from rollouts.errors import PixelMismatchError, SampleError
from rollouts.models.architecture import architecture
from rollouts.models.placed_rows import TokenRow
from rollouts.models.positions import media_positions
from rollouts.training import (
    TrainingBatch,
    TrainingSample,
    mismatch_report,
    sample_from_rendered,
    samples_from_trajectory,
    token_logprobs,
)
from rollouts.training.adapters import AdapterError, trl_sft_batch
from rollouts.training.packing import pack_samples
from rollouts.trajectory.packed_episodes import pack_episodes
from transport import RecordReader, decode, encode

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


_TENSORS = {"return_tensors": "pt"}


class Omni:
    """A tiny omni model, and a renderer of videos with their sound."""

    def __init__(self, name):
        family = loaded_family(name)
        self.name, self.model, self.processor = name, family.model, family.processor
        self.directory, self.silent = family.directory, family.renderer
        self.renderer = load_renderer(family.directory, chat_template_kwargs={"use_audio_in_video": True})

    def sample(self, *parts, completion=COMPLETION, name="row"):
        rendered = self.renderer.render(conversation(*parts), add_generation_prompt=True)
        media = rendered.multi_modal_data.items_with_ranges() if rendered.multi_modal_data else ()
        ids = np.array([*rendered.token_ids, *completion], np.int32)
        mask, zeros = np.arange(len(ids)) >= len(rendered), np.zeros(len(ids), np.float32)
        return TrainingSample(ids, mask, zeros, zeros, tuple(media), name=name)

    def inputs(self, *parts):
        """What the processor of transformers makes of a conversation."""
        text = self.processor.apply_chat_template(conversation(*parts), add_generation_prompt=True, tokenize=False)
        images = [part["image"] for part in parts if not isinstance(part, Film) and part["type"] == "image"]
        media = inputs_of(parts) | ({"images": [images], "images_kwargs": _TENSORS} if images else {})
        inputs = dict(self.processor(text=[text], text_kwargs=_TENSORS, **media))
        if "video_second_per_grid" in inputs:
            inputs["video_second_per_grid"] = torch.tensor(np.asarray(inputs["video_second_per_grid"]))
        return inputs

    def plain(self, *parts, completion=COMPLETION):
        """float32 (completion,): by `model(**processor(...), use_audio_in_video=True)`."""
        inputs = self.inputs(*parts)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([completion])], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        with_sound = any(isinstance(part, Film) and part.samples is not None for part in parts)
        with torch.no_grad():
            logits = self.model(**inputs, use_audio_in_video=with_sound).logits[0, -len(completion) - 1 : -1]
        return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(completion)[:, None])[:, 0]


@pytest.fixture(scope="module")
def omni(request):
    return Omni(request.param)


def families(*names):
    return pytest.mark.parametrize("omni", names, indirect=True)


EACH = families("qwen2_5_omni", pytest.param("qwen3_omni", marks=pytest.mark.slow))
ONE = families("qwen2_5_omni")


def said(text):
    return {"type": "text", "text": text}


def hear(seconds):
    samples = np.random.default_rng(round(100 * seconds)).uniform(-0.5, 0.5, round(seconds * RATE))
    return {"type": "audio", "audio": samples.astype(np.float32), "sampling_rate": RATE}


def see(width):
    values = np.random.default_rng(width).integers(0, 256, (56, width, 3), dtype=np.uint8)
    return {"type": "image", "image": Image.fromarray(values)}


def conversation(*parts):
    return [{"role": "user", "content": [part.part if isinstance(part, Film) else part for part in parts]}]


#: Shorter and longer sounds than the frames, beside other media, two films, a silent one, text.
ROWS = (
    (film(6, 1.5), said("What?")),
    (see(84), film(2, 3.0, seed=1), said("And?"), hear(0.6)),
    (film(4, 0.5, seed=2), said("Or"), film(4, 2.1, seed=3, fps=1)),
    (film(4, None, seed=4), said("No sound.")),
    (said("only text"),),
)


# Log-probabilities.


@pytest.mark.slow
@EACH
def test_rows_with_films_have_the_log_probabilities_of_the_models_own_forward_in_every_layout(omni):
    samples = [omni.sample(*parts, name=str(number)) for number, parts in enumerate(ROWS)]
    # Qwen3-Omni's own forward lets the padding of one sound change the features of another one.
    plain = [omni.plain(*parts) if _is_exact(omni, parts) else None for parts in ROWS]
    with torch.no_grad():
        alone = [of_samples(omni.model, [sample])[0] for sample in samples]
        assert close(*zip(*((a, b) for a, b in zip(alone, plain, strict=True) if b is not None), strict=True))
        for layout in LAYOUTS.values():
            assert close(of_samples(omni.model, samples, **layout), alone)


def _is_exact(omni, parts):
    heard = [part for part in parts if (part.samples is not None if isinstance(part, Film) else "audio" in part)]
    return omni.name != "qwen3_omni" or len(heard) < 2


@pytest.mark.slow
@EACH
def test_another_sound_of_the_same_frames_changes_the_log_probabilities_and_so_do_its_positions(omni):
    """The planted faults of the comparison above."""
    heard, other = (omni.sample(film(4, 1.0, sound_seed=seed)) for seed in (1, 2))
    assert np.array_equal(heard.token_ids, other.token_ids)
    inputs = omni.inputs(film(4, 1.0, sound_seed=1))
    inputs["input_ids"] = torch.from_numpy(heard.token_ids.astype(np.int64))[None]
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        logits = omni.model(**inputs, use_audio_in_video=False).logits[0, -len(COMPLETION) - 1 : -1]
        misplaced = torch.log_softmax(logits, -1).gather(1, torch.tensor(COMPLETION)[:, None])[:, 0]
        ours = of_samples(omni.model, [heard])
        assert not close(ours, of_samples(omni.model, [other]))
        assert not close(ours, [misplaced])


@pytest.mark.slow
@EACH
def test_the_stock_forward_on_model_inputs_gives_the_same_log_probabilities(omni):
    samples = [omni.sample(film(4, 1.0)), omni.sample(film(4, 1.0, seed=1), see(84)), omni.sample(film(2, None))]
    for layout in LAYOUTS.values():
        assert stock_equals_ours(omni.model, TrainingBatch.from_samples(samples, pad_id=0, **layout))


@pytest.mark.slow
@EACH
def test_gradients_of_a_packed_batch_reach_the_towers_of_both(omni):
    samples = [omni.sample(film(4, 1.2)), omni.sample(film(2, 0.4, seed=1), hear(0.5)), omni.sample(said("text"))]
    found = assert_same_gradients(omni.model, samples)
    for tower in ("audio", "visual"):
        assert any(gradient.abs().max() > 1e-6 for name, gradient in found.items() if tower in name)


@ONE
def test_an_audio_token_that_was_sampled_after_a_film_is_text(omni):
    config = omni.model.config
    literal = [65, config.audio_token_id, config.video_token_id, config.audio_start_token_id, 66]
    beside = omni.sample(film(4, 1.0), completion=literal)
    with torch.no_grad():
        first = of_samples(omni.model, [beside])[0][0]
        assert torch.allclose(first, of_samples(omni.model, [omni.sample(film(4, 1.0))])[0][0], atol=1e-5, rtol=0)


# Positions.


def positions_of(omni, sample):
    ids = sample.token_ids[~sample.loss_mask]
    return media_positions(architecture(omni.model), TokenRow(ids, sample.media))


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("row", [0, 1, 2])
def test_positions_are_those_of_the_models_own_index(omni, row):
    inputs = omni.inputs(*ROWS[row])
    seconds, mask = inputs.get("video_second_per_grid"), inputs["feature_attention_mask"]
    expected, delta = omni.model.model.get_rope_index(
        inputs["input_ids"],
        inputs.get("image_grid_thw"),
        inputs["video_grid_thw"],
        inputs["attention_mask"],
        True,
        mask.sum(-1),
        seconds,
    )
    ours, following = positions_of(omni, omni.sample(*ROWS[row]))
    assert np.array_equal(ours, expected[:, 0].numpy())
    assert following == inputs["input_ids"].shape[1] + delta.item()


@ONE
def test_a_silent_film_behind_one_with_a_sound_has_the_positions_of_a_video(omni):
    """The model's own index takes all films of a call with their sound, or none."""
    loud, quiet = film(4, 1.0), film(6, None, seed=1)
    both, alone = omni.sample(loud, quiet), omni.sample(quiet)
    (_, first), (_, second) = both.media
    ((_, place),) = alone.media
    own, following = positions_of(omni, both)
    expected, end = positions_of(omni, alone)
    shift = own[0, second.offset] - expected[0, place.offset]
    assert np.array_equal(own[:, second.offset :], expected[:, place.offset :] + shift)
    assert following == end + shift
    until = first.end + 1
    assert np.array_equal(own[:, :until], positions_of(omni, omni.sample(loud))[0][:, :until])


@ONE
def test_a_film_without_its_start_tokens_is_refused_with_its_row(omni):
    sample = omni.sample(film(4, 1.0), name="odd")
    ids = sample.token_ids.copy()
    ids[sample.media[0][1].offset - 1] = 65
    with pytest.raises(SampleError, match=r"odd.*does not begin with the tokens .*chat template"):
        of_samples(omni.model, [replace(sample, token_ids=ids)])


# Samples and batches.


@ONE
def test_the_sound_of_a_film_cannot_be_left_out(omni):
    sample = omni.sample(film(4, 1.0))
    silent = omni.silent.render(conversation(film(4, 1.0))).multi_modal_data.media_items["video"][0]
    with pytest.raises(SampleError, match=f"has {silent.num_tokens} tokens, but {sample.media[0][0].num_tokens}"):
        replace(sample, media=((silent, sample.media[0][1]),))


@ONE
def test_trainers_that_would_place_it_otherwise_refuse_it_by_name(omni):
    messages = [*conversation(film(4, 1.0)), {"role": "assistant", "content": "yes"}]
    sample = sample_from_rendered(build_training_sample(omni.renderer, messages))
    with pytest.raises(AdapterError, match=r"use_audio_in_video.*token_logprobs"):
        trl_sft_batch([sample], pad_id=0)


@ONE
def test_with_uniform_modality_no_rank_runs_the_tower_of_sounds_alone(omni):
    """Under FSDP the other ranks would wait in it."""
    loud, quiet = omni.sample(film(4, 0.5), name="loud"), omni.sample(film(4, None), name="quiet")
    plan = pack_samples([loud, quiet], max_tokens=len(loud), ranks=2, uniform_modality=True)
    heard = [[any(item.has_sound for item, _ in row.media) for rank in step for row in rank] for step in plan.steps]
    assert sorted(heard) == [[False, False], [True, True]]


# Episodes.


class Watching:
    """Two films with sounds and a silent one, one after the other."""

    def reset(self, seed):
        self.turn = 0
        return conversation(film(4, 1.3, seed=seed), said("What?"))

    def step(self, assistant):
        self.turn += 1
        shown = [film(2, 0.7, seed=7), hear(0.4)] if self.turn == 1 else [film(2, None, seed=8), see(84)]
        return StepResult(conversation(*shown, said("Now?")), reward=1.0, done=self.turn == 3)


def play(omni, seed):
    sampling = SamplingParams(max_tokens=6, seed=seed)
    engine = LocalEngine(omni.model)
    episode = run_episode(Watching(), engine=engine, renderer=omni.renderer, sampling=sampling, max_turns=3, seed=seed)
    return asyncio.run(episode)


@pytest.mark.slow
@EACH
def test_episodes_of_several_turns_are_scored_as_they_were_sampled(omni, tmp_path):
    trajectories = [play(omni, seed) for seed in range(2)]
    assert [each.num_turns for each in trajectories] == [3, 3]
    assert sum(each.forks for each in trajectories) == 0
    (leaf,) = trajectories[0].leaves()
    assert [each.modality for each in trajectories[0].media(leaf)] == ["video", "video", "audio", "video", "image"]
    stored = list(RecordReader(file_of(tmp_path / "t.mmr", *trajectories)))
    samples = [
        sample
        for trajectory in [*map(decode, map(encode, trajectories)), *stored]
        for sample in samples_from_trajectory(trajectory, advantage=1.0, processors=omni.renderer.processors)
    ]
    assert len(samples) == 4
    for layout in ("padded", "packed"):
        batch = TrainingBatch.from_samples(samples, pad_id=0, layout=layout)
        with torch.no_grad():
            report = mismatch_report(batch, token_logprobs(omni.model, batch))
        assert report.max_abs < 1e-5
        assert {group.label for group in report.by_modality} == {"video", "audio", "image"}
    with pytest.raises(PixelMismatchError):
        samples_from_trajectory(trajectories[0], advantage=1.0, processors=omni.silent.processors)
    packed = decode(encode(pack_episodes(trajectories, pixels="float32", processors=omni.renderer.processors)))
    again = samples_from_trajectory(packed.episodes[0], advantage=1.0, processors=packed.processors())
    assert again[0].media[0][0].feature_counts == samples[0].media[0][0].feature_counts
