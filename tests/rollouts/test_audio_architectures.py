"""Log-probabilities and gradients of architectures that hear: by range, padded and packed, against a plain forward."""

from dataclasses import replace
from types import SimpleNamespace

import audio_models
import numpy as np
import pytest
import torch
import transformers
from audio_models import EACH
from family_rows import COMPLETION, loaded_family
from safetensors.torch import load_file, save_file
from test_model_architectures import LAYOUTS, assert_same_gradients, close, of_samples, stock_equals_ours
from test_sampled_placeholders import UNUSED, check_is_text

from renderers import MediaItem, PlaceholderRange, build_training_sample
from renderers.media.item import MediaSource, TensorField
from renderers.vision.batching import batch_tensors
from rollouts.errors import SampleError, UnsupportedModelError
from rollouts.models.architecture import architecture
from rollouts.models.loading import load_model
from rollouts.models.lora_modules import LoraOptions, linear_layers
from rollouts.models.placed_rows import TokenRow
from rollouts.models.positions import media_positions
from rollouts.training import TrainingBatch, TrainingSample, model_inputs, sample_from_rendered
from rollouts.training.trainer import Trainer, datum_from_sample

pytestmark = pytest.mark.filterwarnings("error::FutureWarning")


@pytest.fixture
def family(request):
    return loaded_family(request.param)


def families(*names):
    return pytest.mark.parametrize("family", names, indirect=True)


@pytest.mark.slow
@families(*EACH)
def test_a_sampled_placeholder_of_a_sound_is_the_text_token_that_its_embedding_says(family):
    sounds, beside = [family.sound(0.5)], family.row("beside", sounds=[family.sound(0.2)]).sample
    unused = 383 if family.name == "gemma3n" else UNUSED  # above it is the vocabulary of pictures
    check_is_text(family, family.row("one", sounds=sounds).placeholder_id, beside, unused=unused, sounds=sounds)


@families(pytest.param("phi4_multimodal", marks=pytest.mark.slow), "qwen2_audio")
def test_adapters_are_on_layers_of_the_language_model_and_on_none_of_a_tower(family):
    """Phi-4 has its towers inside of the module that its language model is."""
    names = linear_layers(architecture(family.model), LoraOptions())
    of_towers = ("audio", "image", "encoder", "projector")
    assert len(names) >= 9
    assert not [name for name in names if any(part in name for part in of_towers)]


@pytest.mark.slow
@families("qwen2_audio")
def test_sounds_of_one_token_are_no_markers_to_expand(family):
    """Qwen2-Audio expands placeholders that stand alone, as the first processors left them."""
    rows = [family.row(f"click {number}", sounds=[family.sound(0.05)]) for number in range(2)]
    assert [len(row.sample.media[0][1].runs) for row in rows] == [1, 1]
    assert [item.num_tokens for row in rows for item, _ in row.sample.media] == [1, 1]
    plain = [family.plain_logprobs(row) for row in rows]
    with torch.no_grad():
        for layout in LAYOUTS.values():
            assert close(of_samples(family.model, [row.sample for row in rows], **layout), plain)


@pytest.mark.slow
@families("phi4_multimodal")
def test_what_was_sampled_before_the_first_image_of_a_row_was_sampled_without_it(family):
    """Phi-4 has one projection for sounds, and one for sounds beside images."""
    sound, picture = {"type": "audio", "audio": family.sound(1.0), "sampling_rate": 16000}, family.pixels(56, 84)
    turns = [{"role": "user", "content": [sound]}, {"role": "assistant", "content": "A tone."}]
    turns += [
        {"role": "user", "content": [{"type": "image", "image": picture}]},
        {"role": "assistant", "content": "No."},
    ]
    built = (build_training_sample(family.renderer, messages) for messages in (turns[:2], turns))
    first, whole = map(sample_from_rendered, built)
    trained = [np.flatnonzero(sample.loss_mask) for sample in (first, whole)]
    count = len(trained[0])
    assert (trained[0] == trained[1][:count]).all()
    assert len(trained[1]) > count
    beside = family.row("beside").sample
    with torch.no_grad():
        alone = of_samples(family.model, [first])[0]
        second = replace(whole, loss_mask=whole.loss_mask & (np.arange(len(whole)) > trained[0][-1]))
        given = model_inputs(TrainingBatch.from_samples([second], pad_id=0), family.model)
        logits = family.model(**given).logits[0]
        scored = torch.log_softmax(logits[:-1], -1).gather(
            1, torch.from_numpy(whole.token_ids.astype(np.int64))[1:, None]
        )
        beside_image = scored[trained[1] - 1, 0]
        for layout in LAYOUTS.values():
            ours = of_samples(family.model, [whole, beside], **layout)[0]
            assert close([ours[:count], ours[count:]], [alone, beside_image[count:]])
        assert not close([alone], [beside_image[:count]])
    with pytest.raises(SampleError, match="with an image behind what was sampled from it"):
        model_inputs(TrainingBatch.from_samples([whole], pad_id=0), family.model)
    assert_same_gradients(family.model, [whole, beside])
    trainer = Trainer.from_pretrained(family.directory, device="cpu")
    trainer.create_model("all", lora=LoraOptions(rank=1))
    data = [datum_from_sample(sample, "cross_entropy") for sample in (beside, whole)]
    _, found = trainer.forward("all", data, "cross_entropy").logprobs
    assert close([torch.from_numpy(found[trained[1] - 1])], [torch.cat([alone, beside_image[count:]])])


@pytest.mark.slow
@families("qwen3_omni", "phi4_multimodal")
def test_a_batch_that_changes_a_sound_in_the_stock_forward_has_no_model_inputs(family):
    short, long, other = (family.row("x", sounds=[family.sound(seconds)]).sample for seconds in (0.6, 2.5, 0.6))
    seen = family.row("seen", [family.pixels(56, 84)], sounds=[family.sound(0.6)]).sample
    batch = TrainingBatch.from_samples([short, other], pad_id=0)
    with torch.no_grad():
        assert stock_equals_ours(family.model, batch)
    changing = [[long, short], [short, seen]] if family.name == "phi4_multimodal" else [[long, short]]
    for samples in changing:
        with pytest.raises(SampleError, match=r"would change the features of a sound.*with token_logprobs"):
            model_inputs(TrainingBatch.from_samples(samples, pad_id=0), family.model)


@pytest.mark.slow
@families("qwen2_5_omni")
def test_positions_beside_pictures_are_those_of_the_models_own_index(family):
    """`get_rope_index` of an Omni model on the processor's ids, which have a start token before each medium."""
    pictures, sounds = [family.pixels(56, 84), family.pixels(112, 56)], [family.sound(0.7), family.sound(0.4)]
    row = family.row("both", pictures, sounds=sounds)
    ids = torch.from_numpy(row.sample.token_ids.astype(np.int64))[None]
    items = [item for item, _ in row.sample.media]
    grids = torch.from_numpy(np.stack([item["image_grid_thw"] for item in items if "image_grid_thw" in item]))
    frames = torch.tensor([int(item["feature_attention_mask"].sum()) for item in items if item.modality == "audio"])
    expected, delta = family.model.model.get_rope_index(
        ids, image_grid_thw=grids, attention_mask=torch.ones_like(ids), audio_seqlens=frames
    )
    ours, following = media_positions(architecture(family.model), TokenRow(ids[0].numpy(), row.sample.media))
    assert (ours == expected[:, 0].numpy()).all()
    assert following == len(ids[0]) + delta
    assert (ours.max(0) > ours.min(0)).any()


def test_of_a_checkpoint_with_a_talker_the_thinker_is_loaded_and_the_whole_model_is_refused(tmp_path):
    family = loaded_family("qwen2_5_omni")
    config = transformers.Qwen2_5OmniConfig(thinker_config=family.model.config.to_dict())
    config.save_pretrained(tmp_path)
    stored = load_file(family.directory / "model.safetensors")
    weights = {f"thinker.{name}": tensor for name, tensor in stored.items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, expected = load_model(tmp_path).state_dict(), family.model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    whole = torch.nn.Module()
    whole.config, whole.base_model, whole.thinker = config, torch.nn.Module(), family.model
    with pytest.raises(UnsupportedModelError, match=r"pass model\.thinker"):
        architecture(whole)


def voxtral_items():
    """Windows of 30 s with 375 tokens each, from the processor's own feature extraction."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    for seconds in (1, 31):
        sound = np.random.default_rng(seconds).uniform(-0.5, 0.5, seconds * 16000).astype(np.float32)
        options = {"pad_to_multiple_of": 480_000, "truncation": False, "sampling_rate": 16000, "return_tensors": "pt"}
        features = transformers.VoxtralProcessor._retrieve_input_features(
            SimpleNamespace(feature_extractor=extractor), [sound], 3000, padding=True, **options
        )
        yield made_item(
            {"input_features": features.numpy()}, {"input_features": TensorField("flat")}, 375 * len(features)
        )


def granite_items():
    """Frames, and one token for each of three queries a window of 15 frames."""
    for frames in (20, 47):
        features = np.random.default_rng(frames).normal(size=(frames, 160)).astype(np.float32)
        count = -(-frames // 15) * 3
        tensors = {"input_features": features, "input_features_mask": np.ones(count, bool)}
        # No mask says which frames are padding, so that its processor gives no value for them.
        fields = {"input_features": TensorField("batched"), "input_features_mask": TensorField("batched", 0.0)}
        yield made_item(tensors, fields, count)


def made_item(tensors, fields, num_tokens):
    source = MediaSource.of(tensors["input_features"].tobytes())
    return MediaItem("audio", source.digest, source, tensors, num_tokens, None, fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "items"),
    [(audio_models.voxtral, voxtral_items), (audio_models.granite_speech, granite_items)],
    ids=["voxtral", "granite_speech"],
)
def test_items_that_no_renderer_makes_have_the_log_probabilities_of_a_plain_forward_in_every_layout(build, items):
    model, samples, plain = build(), [], []
    for item in items():
        ids = np.array([5, 6, *[24] * item.num_tokens, 7, *COMPLETION], np.int32)
        mask, zeros = np.arange(len(ids)) >= len(ids) - len(COMPLETION), np.zeros(len(ids), np.float32)
        placed = ((item, PlaceholderRange(2, item.num_tokens)),)
        samples.append(TrainingSample(ids, mask, zeros, zeros, placed, name=str(len(ids))))
        tensors = {name: torch.from_numpy(array) for name, array in batch_tensors([item]).items()}
        given = torch.from_numpy(ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=given, **tensors).logits[0, -len(COMPLETION) - 1 : -1]
        plain.append(torch.log_softmax(logits, -1).gather(1, given[0, -len(COMPLETION) :, None])[:, 0])
    with torch.no_grad():
        for layout in LAYOUTS.values():
            assert close(of_samples(model, samples, **layout), plain)
    assert_same_gradients(model, samples)
