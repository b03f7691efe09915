"""A placeholder token that the policy sampled is text, also where transformers looks for images by token id."""

import copy
import threading

import pytest
import torch
from family_rows import loaded_family

from rollouts.errors import SampleError
from rollouts.models.architecture import architecture
from rollouts.training import TrainingBatch, model_inputs, token_logprobs

UNUSED = 399  # an id without a token


@pytest.fixture
def family(request):
    return loaded_family(request.param)


def families(*names):
    return pytest.mark.parametrize("family", names, indirect=True)


def with_copied_token(model, source, target):
    """A model for which two ids are the same text: every embedding of `target` is that of `source`."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for module in changed.modules():
            if isinstance(module, torch.nn.Embedding) and module.num_embeddings > max(source, target):
                module.weight[target] = module.weight[source]
    return changed


def logprobs(model, samples, **layout):
    batch = TrainingBatch.from_samples(samples, pad_id=0, **layout)
    with torch.no_grad():
        scored = token_logprobs(model, batch)
    return [scored[(batch.sequence_ids == index) & batch.loss_mask] for index in range(len(samples))]


@families(
    "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4", "glm4v", "llava_next", "idefics3", "smolvlm", "mistral3"
)
def test_a_sampled_placeholder_token_is_the_text_token_that_its_embedding_says(family):
    beside = family.row("beside", [family.pixels(32, 32)]).sample
    check_is_text(family, min(architecture(family.model).placeholder_ids), beside, images=[family.pixels(32, 48)])


def check_is_text(family, literal_id, beside, *, unused=UNUSED, **media):
    """The same text under an id that is no placeholder gives the same log-probabilities of what follows."""
    model = with_copied_token(family.model, literal_id, unused)
    for shown in (media, {}):
        literal, usual = (
            family.row("x", **shown, completion=[65, token, token, 66, 67]).sample for token in (literal_id, unused)
        )
        for layout in ("padded", "packed"):
            ours, _ = logprobs(model, [literal, beside], layout=layout)
            expected, _ = logprobs(model, [usual, beside], layout=layout)
            assert torch.allclose(ours[[0, 3, 4]], expected[[0, 3, 4]], atol=1e-5, rtol=0)


@families("qwen2_5_vl", "gemma3")
def test_model_inputs_refuse_a_sampled_placeholder_and_name_row_and_token(family):
    literal_id = min(architecture(family.model).placeholder_ids)
    sample = family.row("x", [family.pixels(32, 32)], completion=[65, literal_id]).sample
    with pytest.raises(SampleError, match=f"sample x: the token at position {len(sample) - 1} has id {literal_id}"):
        model_inputs(TrainingBatch.from_samples([sample], pad_id=0), family.model)


@families("idefics3")
def test_a_model_without_a_known_search_has_the_row_refused_by_name(family, monkeypatch):
    monkeypatch.delattr(type(family.model.model), "inputs_merger")
    literal_id = min(architecture(family.model).placeholder_ids)
    sample = family.row("x", completion=[65, literal_id]).sample
    with pytest.raises(
        SampleError,
        match=r"sample x: .* no known method .*tried: get_placeholder_mask, inputs_merger",
    ):
        token_logprobs(family.model, TrainingBatch.from_samples([sample], pad_id=0))


@families("qwen2_5_vl")
def test_forward_passes_of_other_threads_are_not_affected(family):
    """Each thread has its own placeholders; the model itself is never changed."""
    literal_id = min(architecture(family.model).placeholder_ids)
    image = family.pixels(32, 48)
    samples = [family.row("x", [image], completion=[65, token, 66]).sample for token in (literal_id, 68)]
    expected = [logprobs(family.model, [sample])[0] for sample in samples]
    results: list[list[torch.Tensor]] = [[], []]
    barrier = threading.Barrier(2)

    def run(index):
        for _ in range(5):
            barrier.wait()
            results[index].append(logprobs(family.model, [samples[index]])[0])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "get_placeholder_mask" not in vars(family.model.model)
    for index in range(2):
        assert len(results[index]) == 5
        assert all(torch.allclose(each, expected[index], atol=1e-5) for each in results[index])
