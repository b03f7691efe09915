"""Scores of given tokens under an engine, against the log-probabilities that the trainer computes of them."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from family_rows import loaded_family

from renderers import load_renderer
from rollouts import Completion, FinishReason, GenerateResult, LocalEngine, Trajectory
from rollouts.engines.protocol import Engine
from rollouts.errors import ArgumentError, MalformedResultError, MissingLogProbsError, SampleError
from rollouts.scoring import score, with_scores
from rollouts.teacher import check_teacher
from rollouts.testing import ScriptedEngine, tiny_qwen3_vl
from rollouts.training import (
    TrainingBatch,
    TrainingSample,
    candidate_logprobs,
    samples_from_trajectory,
    token_logprobs,
    truncate_sample,
    with_teacher,
)
from rollouts.training.packing import neutral_sample

FAMILIES = ("qwen3_vl", "gemma3", "llava_next", "internvl", "qwen2_audio")


class CountingEngine(Engine):
    """Counts the requests of a LocalEngine, and keeps them."""

    def __init__(self, engine):
        self.engine, self.requests = engine, []

    async def generate(self, request, listen=None):
        self.requests.append(request)
        return await self.engine.generate(request)

    async def close(self):
        await self.engine.close()


def scored(subject, model, **options):
    async def run():
        engine = CountingEngine(LocalEngine(model))
        try:
            return await score(subject, engine, **options), engine.requests
        finally:
            await engine.close()

    return asyncio.run(run())


def all_trained(sample):
    """A sample that trains every token but the first and those of media."""
    mask = np.ones(len(sample), bool)
    mask[0] = False
    for _, placeholder in sample.media:
        mask[placeholder.offset : placeholder.end] = False
    return replace(sample, loss_mask=mask)


def by_trainer(model, samples, **layout):
    """The trainer's log-probabilities of the trained tokens of each sample, NaN elsewhere."""
    found = []
    for sample in samples:
        batch = TrainingBatch.from_samples([sample], pad_id=0, **layout)
        with torch.no_grad():
            values = token_logprobs(model, batch)[0].numpy()
        found.append(np.where(sample.loss_mask, values[: len(sample)], np.nan))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_the_trainers_log_probabilities_of_text_images_and_sounds(name):
    family = loaded_family(name)
    rows = family.rows_with_sounds() if name == "qwen2_audio" else family.rows()
    samples = [all_trained(row.sample) for row in rows]
    scores, requests = scored(samples, family.model, renderer=family.renderer, teacher=family.renderer)
    assert len(requests) == len(samples)
    for sample, found, expected in zip(samples, scores, by_trainer(family.model, samples), strict=True):
        assert found.logprobs.dtype == np.float32
        assert np.isnan(found.logprobs[0])
        np.testing.assert_allclose(found.logprobs[sample.loss_mask], expected[sample.loss_mask], atol=1e-4)


def test_the_likeliest_tokens_of_a_teacher_are_those_of_its_logits():
    family = loaded_family("qwen3_vl")
    sample = all_trained(family.row("one", [family.pixels(32, 48)]).sample)
    (found,), _ = scored([sample], family.model, top_k=5)
    batch = TrainingBatch.from_samples([sample], pad_id=0)
    size = family.model.config.text_config.vocab_size
    every = torch.arange(size).expand(1, len(sample), size)
    with torch.no_grad():
        expected = candidate_logprobs(family.model, batch, every)[0].numpy()
    mask = sample.loss_mask
    assert found.top.token_ids.shape == (len(sample), 5)
    np.testing.assert_allclose(found.top.logprobs[mask], -np.sort(-expected[mask], axis=-1)[:, :5], atol=1e-4)
    at = np.take_along_axis(expected, np.maximum(found.top.token_ids, 0).astype(np.int64), -1)
    np.testing.assert_allclose(found.top.logprobs[mask], at[mask], atol=1e-4)
    (taught,) = with_teacher([sample], [found])
    assert taught.teacher_top_ids[0].tolist() == [-1] * 5


def test_another_picture_changes_the_scores():
    """The planted fault of the comparison above."""
    family = loaded_family("qwen3_vl")
    one, other = (family.row("one", [family.pixels(32, 48)]).sample for _ in range(2))
    (first, second), requests = scored([one, other], family.model)
    assert np.array_equal(one.token_ids, other.token_ids)
    assert len(requests) == 2
    assert np.abs(first.logprobs - second.logprobs)[one.loss_mask].max() > 1e-4


def test_equal_rows_are_one_request_and_rows_of_one_token_none():
    family = loaded_family("qwen3_vl")
    sample = family.row("one", [family.pixels(32, 48)]).sample
    short, _ = truncate_sample(sample, 1)
    scores, requests = scored([sample, replace(sample, name="again"), short], family.model)
    assert len(requests) == 1
    assert np.array_equal(scores[0].logprobs, scores[1].logprobs, equal_nan=True)
    assert np.isnan(scores[2].logprobs).tolist() == [True]


@pytest.fixture(scope="module")
def renderer(tiny_model_dir):
    return load_renderer(tiny_model_dir)


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    from rollouts.models.loading import load_model

    return load_model(tiny_model_dir)


def completion(ids, logprobs=None):
    values = np.full(len(ids), -1.0) if logprobs is None else logprobs
    return Completion(0, np.array(ids, np.int32), np.asarray(values, np.float32), FinishReason.LENGTH)


def forked(renderer):
    """An episode of one prompt with a picture, and two completions of it: a tree with two leaves."""
    picture = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    messages = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "Which?"}]}]
    prompt = renderer.render(messages, add_generation_prompt=True)
    trajectory = Trajectory("forked")
    for ids in ([65, 66, 67], [65, 68]):
        trajectory.add_turn(prompt, completion(ids), {"role": "assistant", "content": ""}, messages=messages)
    trajectory.finish()
    return trajectory


def test_the_scores_of_a_trajectory_are_columns_of_its_nodes_and_of_its_samples(renderer, model):
    trajectory = forked(renderer)
    scores, requests = scored(trajectory, model, renderer=renderer)
    assert [len(request.prompt_ids) for request in requests] == [
        len(trajectory.token_ids(leaf)) for leaf in trajectory.leaves()
    ]
    assert len({request.session_id for request in requests}) == 1  # the picture goes to one server
    taught = with_scores(trajectory, scores)
    assert taught.finished
    assert not trajectory.nodes[0].extras
    samples = samples_from_trajectory(taught, advantage=1.0, processors=renderer.processors)
    for sample, found in zip(samples, scores, strict=True):
        np.testing.assert_allclose(sample.teacher_logprobs, found.logprobs, atol=1e-5)
    expected = by_trainer(model, samples)
    differences = np.concatenate(
        [(sample.logprobs - one)[sample.loss_mask] for sample, one in zip(samples, expected, strict=True)]
    )
    assert taught.metrics["teacher_kl"] == pytest.approx(differences.mean(), abs=1e-4)


def test_turns_of_which_options_left_ids_out_are_not_compared_with_the_teacher(renderer, model):
    """Log-probabilities among the kept ids are larger than those among all, which the teacher's are."""
    trajectory = forked(renderer)
    scores, _ = scored(trajectory, model, renderer=renderer)
    whole = with_scores(trajectory, scores)
    first, second = (turn.node for turn in trajectory.turns)
    trajectory.nodes[second].extras.update(sampling_mask=np.full((2, 1), -1, np.int32))
    node = whole.nodes[first]
    expected = (node.logprobs - node.extras["teacher_logprobs"][node.sampled]).mean()
    assert with_scores(trajectory, scores).metrics["teacher_kl"] == pytest.approx(expected, rel=1e-5)
    assert whole.metrics["teacher_kl"] != pytest.approx(expected, rel=1e-3)


def test_an_engine_without_log_probabilities_of_the_prompt_is_refused(renderer):
    trajectory = forked(renderer)

    async def run():
        await score(trajectory, ScriptedEngine(["x"] * 2, renderer=renderer), renderer=renderer)

    with pytest.raises(MissingLogProbsError, match="no log-probabilities of the prompt"):
        asyncio.run(run())


# The columns in samples and batches.


def taught_samples(count, k=2):
    family = loaded_family("qwen3_vl")
    samples = [family.row("word " * number).sample for number in range(1, count + 1)]
    taught = []
    for number, sample in enumerate(samples):
        rng, n = np.random.default_rng(number), len(sample)
        columns = {
            "teacher_logprobs": -rng.random(n, np.float32),
            "teacher_top_logprobs": -rng.random((n, k), np.float32),
        }
        taught.append(replace(sample, teacher_top_ids=rng.integers(0, 99, (n, k), dtype=np.int32), **columns))
    return taught


def test_a_trained_sample_without_a_teacher_is_an_error_and_a_neutral_one_is_not():
    taught = taught_samples(2)
    untaught = replace(taught[1], teacher_logprobs=None, teacher_top_ids=None, teacher_top_logprobs=None, name="plain")
    with pytest.raises(SampleError, match="sample plain has no teacher_logprobs; add it: with_teacher"):
        TrainingBatch.from_samples([taught[0], untaught], pad_id=0).column("teacher_logprobs")
    padded = TrainingBatch.from_samples([taught[0], neutral_sample(0)], pad_id=0)
    assert padded.column("teacher_top_ids").shape == (2, len(taught[0]), 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sample: {"teacher_logprobs": sample.teacher_logprobs[:-1]}, "teacher_logprobs is float32"),
        (lambda sample: {"teacher_logprobs": np.full(len(sample), np.nan, np.float32)}, "under the teacher nan is not"),
        (lambda sample: {"teacher_top_ids": sample.teacher_top_ids[:, :1]}, "the teacher's top is no such pair"),
        (lambda sample: {"teacher_top_ids": sample.teacher_top_ids - 200}, "lacks the teacher's likeliest"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(change, message):
    (sample,) = taught_samples(1)
    with pytest.raises(SampleError, match=message):
        replace(sample, **change(sample))


# Teachers that read other tokens.


@pytest.fixture
def changed(tiny_model_dir, tmp_path):
    """A function that writes a copy of the tiny model with one of its files changed, and loads its renderer."""

    def load(file, change):
        directory = tiny_qwen3_vl(tmp_path / "teacher", weights=False)
        path = directory / file
        text = path.read_text()
        path.write_text(change(text))
        assert path.read_text() != text
        return load_renderer(directory)

    return load


def exchanged(text):
    definition = json.loads(text)
    vocabulary = definition["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    return json.dumps(definition)


def replaced(old, new):
    return lambda text: text.replace(old, new)


TEMPLATE, PROMPT = "chat_template.jinja", "its chat template prints another prompt"
OTHER_TEACHERS = [
    (TEMPLATE, replaced("<|im_start|>", "<|im_start|>the "), rf"{PROMPT}.*the user.*chat_template="),
    (TEMPLATE, replaced("system\\n' + show", "system: ' + show"), f"{PROMPT} with a system message, "),
    (TEMPLATE, replaced("'</tools>", "' </tools>"), f"{PROMPT} with tools, "),
    (TEMPLATE, replaced("'<|vision_start|>", "'Picture: <|vision_start|>"), f"{PROMPT} with an image, "),
    ("tokenizer.json", exchanged, r"its tokenizer of \d+ tokens gives 'a' the id 65, .* 64: take"),
    ("preprocessor_config.json", replaced("0.5", "0.1"), "it processes image input in another way"),
]


@pytest.mark.parametrize(("file", "change", "reason"), OTHER_TEACHERS)
def test_a_teacher_that_reads_other_tokens_or_pixels_is_refused_with_what_differs(
    renderer, changed, file, change, reason
):
    with pytest.raises(ArgumentError, match=reason):
        check_teacher(renderer, changed(file, change))


def test_a_template_that_differs_in_a_comment_alone_is_accepted(renderer, changed):
    check_teacher(renderer, changed(TEMPLATE, lambda text: "{# a comment #}" + text))


def test_a_template_that_refuses_what_that_of_the_student_takes_is_refused_and_the_reverse_is_not(renderer, changed):
    rule = "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}"
    teacher = changed("chat_template.jinja", lambda text: rule + text)
    with pytest.raises(ArgumentError, match=r"refuses a prompt with tools that the student's takes: .*no tools here"):
        check_teacher(renderer, teacher)
    check_teacher(teacher, renderer)


def text_row(ids, dtype=np.int32):
    n = len(ids)
    zeros = np.zeros(n, np.float32)
    return TrainingSample(np.array(ids, dtype), np.zeros(n, bool), zeros, zeros, name="row")


class AnsweringEngine(Engine):
    """Answers each request with given log-probabilities of its prompt."""

    def __init__(self, logprobs):
        self.logprobs = logprobs

    async def generate(self, request, listen=None):
        return GenerateResult(request.request_id, [completion([1])], self.logprobs)

    async def close(self):
        pass


@pytest.mark.parametrize(
    ("logprobs", "error"),
    [
        ([np.nan, -1.0], "3 tokens and 2 log-probabilities"),
        ([np.nan, np.nan, -1.0], "token 1 has log-probability nan"),
        ([np.nan, -1.0, 2.0], "token 2 has log-probability 2.0"),
        ([-1.0, -1.0, -1.0], "the first token has log-probability -1.0, and nothing predicts it"),
    ],
)
def test_scores_that_a_teacher_cannot_have_given_are_refused(logprobs, error):
    engine = AnsweringEngine(np.array(logprobs, np.float32))
    with pytest.raises((MissingLogProbsError, MalformedResultError), match=error):
        asyncio.run(score([text_row([65, 66, 67])], engine))


def test_scores_of_another_teacher_replace_all_columns_of_the_first(renderer, model):
    trajectory = forked(renderer)
    first, _ = scored(trajectory, model, renderer=renderer, top_k=2)
    once = with_scores(trajectory, first)
    assert all("teacher_top_ids" in node.extras for node in once.nodes)
    again = with_scores(once, [each._replace(top=None) for each in first])
    assert all(node.extras.keys() == {"teacher_logprobs"} for node in again.nodes)
