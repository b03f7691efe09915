"""Log-probabilities and gradients of many architectures: padded, packed and single rows, and a plain forward pass."""

import functools
import types
import weakref

import numpy as np
import pytest
import torch
from audio_models import AUDIO_MODELS
from family_rows import loaded_family
from model_families import MEDIA_FAMILIES, TEXT_MODELS, text_config, with_seed
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from rollouts.errors import UnsupportedModelError
from rollouts.models import forward
from rollouts.training import TrainingBatch, TrainingSample, model_inputs, token_logprobs

# An argument that a release of transformers calls deprecated is missing from a later one.
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")

LAYOUTS = {
    "padded": {"layout": "padded"},
    "padded on the left": {"layout": "padded", "side": "left", "multiple_of": 8},
    "packed": {"layout": "packed", "multiple_of": 8},
}


@pytest.fixture
def family(request):
    return loaded_family(request.param)


HEARING = [pytest.param(name, marks=pytest.mark.slow) for name in AUDIO_MODELS]


def rows_of(family):
    return family.rows_with_sounds() if family.name in AUDIO_MODELS else family.rows()


def families(*names):
    return pytest.mark.parametrize("family", names, indirect=True)


@functools.cache
def text_model(name):
    return with_seed(lambda: AutoModelForCausalLM.from_config(text_config(name)))


def text_samples(*lengths, trained=6):
    rng = np.random.default_rng(0)
    zeros = [np.zeros(length, np.float32) for length in lengths]
    masks = [np.arange(length) >= max(1, length - trained) for length in lengths]
    ids = [rng.integers(3, 300, length).astype(np.int32) for length in lengths]
    columns = zip(ids, masks, zeros, strict=True)
    return [TrainingSample(each, mask, zero, zero, name=str(len(each))) for each, mask, zero in columns]


def of_samples(model, samples, **layout):
    """The log-probabilities of the trained tokens of each sample, from one batch."""
    batch = TrainingBatch.from_samples(samples, pad_id=0, **layout)
    scored = token_logprobs(model, batch)
    assert (scored[~batch.loss_mask] == 0).all()
    return [scored[(batch.sequence_ids == index) & batch.loss_mask] for index in range(len(samples))]


def close(one, other):
    return all(torch.allclose(a, b, atol=1e-5, rtol=0) for a, b in zip(one, other, strict=True))


# Values.


@families(*MEDIA_FAMILIES, *HEARING)
def test_rows_with_and_without_media_have_the_log_probabilities_of_a_plain_forward_in_every_layout(family):
    rows = rows_of(family)
    samples = [row.sample for row in rows]
    # GLM-4V has one token id for images and videos; its own forward cannot tell them apart in one row.
    plain = [family.plain_logprobs(row) for row in rows if family.name != "glm4v" or not (row.images and row.videos)]
    with torch.no_grad():
        alone = [of_samples(family.model, [sample])[0] for sample in samples]
        assert close(alone[: len(plain)], plain)
        for layout in LAYOUTS.values():
            assert close(of_samples(family.model, samples, **layout), alone)


@families("qwen2_5_vl", "gemma3", "idefics3", *HEARING)
def test_another_image_or_sound_changes_the_log_probabilities(family):
    """The planted fault of the comparisons above."""
    if family.name in AUDIO_MODELS:
        given, other = (family.row("one", sounds=[family.sound(0.5)]).sample for _ in range(2))
    else:
        given, other = (family.row("one", [family.pixels(32, 48)]).sample for _ in range(2))
    with torch.no_grad():
        assert not close(of_samples(family.model, [given]), of_samples(family.model, [other]))


def parts_of_several_items(base, output):
    output.pooler_output = torch.cat(output.pooler_output).split(3)


def rows_of_another_meaning(base, output):
    """Ovis2's rows for all images: here as many as there are different images."""
    output["indicators"] = torch.zeros(2, 4)


def a_bound_forward(base, output):
    """As accelerate's hooks bind it: a copy of the module calls the methods of the original."""
    vars(base)["forward"] = types.MethodType(type(base).forward, base)


@pytest.mark.parametrize("change", [parts_of_several_items, rows_of_another_meaning, a_bound_forward])
def test_items_are_encoded_at_each_place_where_a_model_has_no_features_of_single_items(change, monkeypatch):
    family = loaded_family("qwen2_5_vl")
    one, other = family.pixels(32, 48), family.pixels(40, 40)
    samples = [family.row("x", images).sample for images in ([one, other], [other, one])]
    expected, counts = of_samples(family.model, samples), []
    base = family.model.model
    encode = base.get_image_features

    def encoded(pixels, grids, **options):
        counts.append(len(grids))
        output = encode(pixels, grids, **options)
        change(base, output)
        return output

    monkeypatch.setattr(forward, "_undivided", weakref.WeakSet())  # other tests use this model
    monkeypatch.setattr(base, "get_image_features", encoded)
    monkeypatch.setitem(vars(base), "forward", base.forward)
    del vars(base)["forward"]  # until `change` binds it; monkeypatch takes that away
    for _ in range(2):
        assert close(of_samples(family.model, samples), expected)
    assert counts[-1] == 4


def test_a_base_model_that_fsdp_divided_encodes_each_image_once(monkeypatch):
    """`fully_shard` gives a module a class whose `__new__` makes the original class: `copy.copy` fails."""
    family = loaded_family("qwen2_5_vl")
    one, other = family.pixels(32, 48), family.pixels(40, 40)
    samples = [family.row("x", images).sample for images in ([one, other], [other, one])]
    expected = of_samples(family.model, samples)
    base = family.model.model
    monkeypatch.setattr(base, "__class__", type("Divided", (type(base),), {"__new__": type(base)}))
    assert close(of_samples(family.model, samples), expected)


def test_llama_4_with_images_is_refused_where_its_own_forward_fails_and_right_where_it_works(monkeypatch):
    family = loaded_family("llama4")
    rows = [
        family.row("only text"),
        family.row("one", [family.pixels(56, 56)]),
        family.row("two", [family.pixels(90, 60)] * 2),
    ]
    samples = [row.sample for row in rows]
    try:
        family.plain_logprobs(rows[0])
    except AttributeError:  # transformers 5.24: the language model gives no image_outputs
        with pytest.raises(UnsupportedModelError, match=r"in transformers 5\.\S+ failed .* 'image_outputs'"):
            of_samples(family.model, samples)
        monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)
    with torch.no_grad():
        for layout in LAYOUTS.values():
            assert close(of_samples(family.model, samples, **layout), [family.plain_logprobs(row) for row in rows])


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_a_text_model_has_the_log_probabilities_of_its_plain_forward_in_every_layout(name):
    model, samples = text_model(name), text_samples(5, 23, 2, 40)
    with torch.no_grad():
        plain = []
        for sample in samples:
            ids = torch.from_numpy(sample.token_ids.astype(np.int64))
            scored = torch.log_softmax(model(ids[None]).logits[0, :-1].float(), -1).gather(1, ids[1:, None])[:, 0]
            plain.append(scored[torch.from_numpy(sample.loss_mask[1:])])
        for layout in LAYOUTS.values():
            assert close(of_samples(model, samples, **layout), plain)


def stock_logprobs(model, batch):
    """float32 of the trained tokens, by the model's own forward on `model_inputs`."""
    logits = model(**model_inputs(batch, model), use_cache=False).logits[:, :-1]
    scored = torch.log_softmax(logits.float(), -1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    return scored[batch.loss_mask[:, 1:]]


@families("qwen2_vl", "qwen2_5_vl", "gemma3", "internvl", "smolvlm", "mistral3", "llava_next")
@pytest.mark.parametrize("layout", [LAYOUTS["padded on the left"], LAYOUTS["packed"]], ids=["padded", "packed"])
def test_the_stock_forward_on_model_inputs_gives_the_same_log_probabilities(family, layout):
    assert stock_equals_ours(
        family.model, TrainingBatch.from_samples([row.sample for row in family.rows()], pad_id=0, **layout)
    )


def stock_equals_ours(model, batch):
    with torch.no_grad():
        ours, stock = token_logprobs(model, batch)[batch.loss_mask], stock_logprobs(model, batch)
    return torch.allclose(ours, stock, atol=1e-5, rtol=0)


@families("qwen3_5")
def test_packed_model_inputs_of_a_model_with_a_recurrent_state_are_refused(family):
    batch = TrainingBatch.from_samples(text_samples(5, 9), pad_id=0, layout="packed")
    with pytest.raises(UnsupportedModelError, match=r"depend on the sample before .* layout=\"padded\""):
        model_inputs(batch, family.model)


# Gradients.


def gradients(model, batches):
    model.zero_grad()
    for batch in batches:
        token_logprobs(model, batch).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(model, samples):
    packed = [TrainingBatch.from_samples(samples, pad_id=0, layout="packed")]
    alone = [TrainingBatch.from_samples([sample], pad_id=0) for sample in samples]
    together, summed = gradients(model, packed), gradients(model, alone)
    assert together.keys() == summed.keys()
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, summed[name], atol=2e-4, rtol=1e-3, msg=name)
    return together


@families("qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", *HEARING)
def test_gradients_of_a_packed_batch_are_the_sum_of_single_rows_and_reach_the_tower(family):
    found = assert_same_gradients(family.model, [row.sample for row in rows_of(family)])
    parts = ("audio", "encoder") if family.name in AUDIO_MODELS else ("visual", "vision")
    tower = [gradient for name, gradient in found.items() if any(part in name for part in parts)]
    assert any(gradient.abs().max() > 1e-6 for gradient in tower)
