"""verl's own DataProto, holding our samples; `ray`, which it needs for workers only, is a module with one name."""

import dataclasses
import sys
from types import ModuleType

import pytest
import torch

from rollouts.training.adapters import AdapterError, verl_data_proto


@pytest.fixture
def types(load_without_init, monkeypatch):
    ray = ModuleType("ray")
    ray.ObjectRef = object
    monkeypatch.setitem(sys.modules, "ray", ray)
    return load_without_init("verl.protocol", "verl", "verl.utils")


def test_positions_are_those_of_the_models_own_rope_index(types, make_sample, model):
    samples = [make_sample(4, images=1), make_sample(2), make_sample(7, images=3)]
    data = verl_data_proto(samples, pad_id=0, mrope=True, types=types)
    is_token, ids = data.batch["attention_mask"].bool(), data.batch["input_ids"]
    inputs = [row for row in data.non_tensor_batch["multi_modal_inputs"] if row]
    grids = torch.cat([row["image_grid_thw"] for row in inputs])
    types_of_tokens = (ids == model.config.image_token_id).long()
    expected, _ = model.model.get_rope_index(
        input_ids=ids, mm_token_type_ids=types_of_tokens, image_grid_thw=grids, attention_mask=is_token.long()
    )
    positions = data.batch["position_ids"]
    assert positions.shape == (3, 4, ids.shape[1])
    for row in range(3):
        assert positions[row, 1:, is_token[row]].tolist() == expected[:, row, is_token[row]].tolist()
        assert positions[row, 0, is_token[row]].tolist() == list(range(len(samples[row])))


def test_the_models_forward_accepts_the_inputs_of_the_rows(types, make_sample, model):
    samples = [make_sample(4, images=1), make_sample(7, images=2)]
    data = verl_data_proto(samples, pad_id=0, mrope=True, types=types)
    inputs = data.non_tensor_batch["multi_modal_inputs"]
    with torch.no_grad():
        logits = model(
            input_ids=data.batch["input_ids"],
            attention_mask=data.batch["attention_mask"],
            position_ids=data.batch["position_ids"][:, 1:].transpose(0, 1),
            pixel_values=torch.cat([row["pixel_values"] for row in inputs]),
            image_grid_thw=torch.cat([row["image_grid_thw"] for row in inputs]),
        ).logits
    assert torch.isfinite(logits[data.batch["attention_mask"].bool()]).all()
    assert inputs[1]["images_seqlens"].tolist() == [16, 32]


def test_without_mrope_positions_count_the_tokens(types, make_sample):
    data = verl_data_proto([make_sample(2), make_sample(5)], pad_id=0, mrope=False, types=types)
    is_token = data.batch["attention_mask"].bool()
    assert data.batch["position_ids"].shape == is_token.shape
    assert data.batch["position_ids"][1, is_token[1]].tolist() == list(range(int(is_token[1].sum())))


def test_mrope_of_a_video_whose_frames_are_one_run_of_tokens_is_refused(types, make_sample):
    sample = make_sample(1, images=1)
    item, placeholder = sample.media[0]
    grid = item["image_grid_thw"].copy()
    grid[0] = 4
    film = dataclasses.replace(item, tensors={**item.tensors, "image_grid_thw": grid})
    sample = dataclasses.replace(sample, media=((film, placeholder),))
    with pytest.raises(AdapterError, match=r"episode-1/0: position_ids: .* one run for each frame"):
        verl_data_proto([sample], pad_id=0, mrope=True, types=types)
