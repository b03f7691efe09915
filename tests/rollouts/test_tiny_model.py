"""The tiny checkpoint is a real one."""

import re
import sys

import numpy as np
import pytest
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoTokenizer

from renderers import load_renderer
from renderers.installation import install_command
from rollouts.errors import MissingExtraError
from rollouts.testing import tiny_qwen2_audio, tiny_qwen3_vl


def weights(directory):
    model = AutoModelForImageTextToText.from_pretrained(directory)
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def test_it_is_a_qwen3_vl_of_under_a_million_parameters(tiny_model_dir):
    model = AutoModelForImageTextToText.from_pretrained(tiny_model_dir)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert 100_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


@pytest.mark.slow
def test_the_seed_decides_the_weights(tiny_model_dir, tmp_path):
    ours = weights(tiny_model_dir)
    again, other = (
        weights(tiny_qwen3_vl(tmp_path / "again", seed=0)),
        weights(tiny_qwen3_vl(tmp_path / "other", seed=1)),
    )
    assert all(np.array_equal(ours[name], again[name]) for name in ours)
    assert not all(np.array_equal(ours[name], other[name]) for name in ours)


def test_writing_it_does_not_change_the_random_state(tmp_path):
    import torch

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny_qwen3_vl(tmp_path, seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_tokenizer_model_and_processor_agree_on_the_control_tokens(tiny_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    config = AutoModelForImageTextToText.from_pretrained(tiny_model_dir).config
    renderer = load_renderer(tiny_model_dir)
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == config.image_token_id
    assert renderer.mm_token_type_id_map == {config.image_token_id: 1, config.video_token_id: 2}
    assert tokenizer.convert_tokens_to_ids("<|vision_start|>") == config.vision_start_token_id
    assert renderer.get_stop_token_ids() == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.eos_token_id == config.text_config.eos_token_id
    processor = AutoImageProcessor.from_pretrained(tiny_model_dir)
    assert processor.patch_size == config.vision_config.patch_size
    assert processor.merge_size == config.vision_config.spatial_merge_size


def test_weights_without_torch_are_an_error_that_names_the_extra_and_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("torch"))):
        tiny_qwen3_vl(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_without_weights_the_other_files_are_the_same(tiny_model_dir, tmp_path):
    tiny_qwen3_vl(tmp_path, weights=False)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "tokenizer.json" in written
    assert not [name for name in written if name.endswith(".safetensors")]
    assert written == {name: (tiny_model_dir / name).read_bytes() for name in written}


@pytest.mark.slow
def test_the_tiny_model_that_hears_is_a_qwen2_audio_whose_files_agree(tmp_path):
    directory = tiny_qwen2_audio(tmp_path)
    model = AutoModelForMultimodalLM.from_pretrained(directory)
    assert type(model).__name__ == "Qwen2AudioForConditionalGeneration"
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    renderer = load_renderer(directory)
    assert renderer.mm_token_type_id_map == {model.config.audio_token_index: 3}
    sound = {"type": "audio", "audio": np.zeros(24_000, np.float32), "sampling_rate": 16_000}
    rendered = renderer.render([{"role": "user", "content": [sound]}])
    (item,) = rendered.multi_modal_data.media_items["audio"]
    frames = item["feature_attention_mask"].sum()
    assert (frames, item["input_features"].shape) == (150, (model.config.audio_config.num_mel_bins, 200))
