"""Trainer: gradients and steps are those of a plain loop over PEFT and transformers; a refusal changes nothing."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from audio_models import AUDIO_MODELS
from family_rows import loaded_family
from model_families import text_config, with_seed
from trainer_checks import (
    SMALL,
    exported,
    gradients,
    peft_model,
    plain_gradients,
    plain_logprobs,
    plain_names,
    random_weights,
    with_nonzero_adapter,
)
from transformers import AutoModelForCausalLM

from rollouts.errors import ArgumentError, SampleError, UnsupportedModelError
from rollouts.models.forward_pass import ForwardPass
from rollouts.models.loading import load_model
from rollouts.training import TrainingSample
from rollouts.training.trainer import AdamParams, Datum, LoraOptions, Trainer, datum_from_sample

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen3_5", "gemma3", "idefics3")
MORE = ("qwen2_vl", "qwen3_vl_moe", "gemma4", "glm4v", "llava_next", "internvl", "smolvlm", "pixtral", "mistral3")
TEXT = ("qwen3", "llama", "gemma2", "phi", "bloom")
EVERYWHERE = replace(SMALL, train_unembed=True)


def text_sample(length, seed):
    ids = np.random.default_rng(seed).integers(3, 300, length).astype(np.int32)
    zeros = np.zeros(length, np.float32)
    return TrainingSample(ids, np.arange(length) > length // 3, zeros, zeros + 1, name=f"text{seed}")


@pytest.fixture
def tiny(tiny_model_dir):
    return Trainer.from_pretrained(tiny_model_dir, device="cpu")


@pytest.fixture
def text_data():
    samples = [text_sample(length, seed) for seed, length in enumerate([9, 17, 5, 17])]
    return [random_weights(sample, seed) for seed, sample in enumerate(samples)]


def saved_text_model(name, directory):
    with_seed(lambda: AutoModelForCausalLM.from_config(text_config(name))).save_pretrained(directory)
    return directory


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        largest = max(1.0, np.abs(expected[name]).max())
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5 * largest, rtol=0, err_msg=name)
    assert max(np.abs(value).max() for value in expected.values()) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("lora", [SMALL, EVERYWHERE], ids=["layers", "layers and output layer"])
@pytest.mark.parametrize(
    "name", [*FAMILIES, "qwen2_audio", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_gradients_of_an_adapter_are_those_of_a_plain_loop_over_text_and_media(name, lora, tmp_path):
    family = loaded_family(name)
    lora = replace(lora, train_mlp=name != "qwen3_vl_moe")  # its experts are one parameter
    # transformers' own forward of GLM takes an image beside a video for a part of the video.
    given = family.rows_with_sounds() if name in AUDIO_MODELS else family.rows()
    rows = [row for row in given if name != "glm4v" or not (row.images and row.videos)]
    samples = [row.sample for row in rows]
    data = [random_weights(sample, seed) for seed, sample in enumerate(samples)]
    trainer = Trainer.from_pretrained(family.directory, device="cpu", tokens_per_pass=150)
    with_nonzero_adapter(trainer, "a", data, lora)
    trainer.save("a", tmp_path / "checkpoint")
    trainer.save_for_sampler("a", tmp_path / "adapter")
    model = peft_model(family.directory, tmp_path / "adapter")

    trainer.load("a", tmp_path / "checkpoint", with_optimizer=False)  # the state of AdamW begins anew
    result = trainer.forward_backward("a", data, "cross_entropy")
    expected = plain_names(plain_gradients(model, samples, data))
    assert_close(gradients(trainer, "a", tmp_path), expected)
    assert any("lm_head" in name for name in expected) is lora.train_unembed

    with torch.no_grad():
        scored = [plain_logprobs(model, sample).numpy() for sample in samples]
    for found, each, datum in zip(result.logprobs, scored, data, strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, each, atol=1e-5, rtol=0)
        assert len(found) == len(datum)
    loss = -sum((each * datum.inputs["weights"]).sum() for each, datum in zip(scored, data, strict=True))
    assert result.metrics["loss:sum"] == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("name", TEXT)
def test_gradients_of_an_adapter_are_those_of_a_plain_loop_for_many_text_models(name, tmp_path, text_data):
    directory = saved_text_model(name, tmp_path / "model")
    samples = [text_sample(length, seed) for seed, length in enumerate([9, 17, 5, 17])]
    trainer = Trainer.from_pretrained(directory, device="cpu", tokens_per_pass=34)
    with_nonzero_adapter(trainer, "a", text_data, EVERYWHERE)
    trainer.save("a", tmp_path / "checkpoint")
    trainer.load("a", tmp_path / "checkpoint", with_optimizer=False)
    trainer.save_for_sampler("a", tmp_path / "adapter")
    trainer.forward_backward("a", text_data, "cross_entropy")
    model = peft_model(directory, tmp_path / "adapter")
    assert_close(gradients(trainer, "a", tmp_path), plain_names(plain_gradients(model, samples, text_data)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_gradients_of_full_training_are_those_of_a_plain_loop(name):
    family = loaded_family(name)
    samples = [row.sample for row in family.rows()]
    data = [random_weights(sample, seed) for seed, sample in enumerate(samples)]
    trainer = Trainer.from_pretrained(family.directory, device="cpu", tokens_per_pass=100)
    trainer.create_model("all", lora=None)
    trainer.forward_backward("all", data, "cross_entropy")
    before = {name: value.detach().numpy().copy() for name, value in trainer.model.named_parameters()}
    trainer.optim_step("all", AdamParams(learning_rate=1e10, eps=1e10))
    after = {name: value.detach().numpy() for name, value in trainer.model.named_parameters()}
    plain = load_model(family.directory).eval()
    expected = plain_gradients(plain, samples, data)
    assert_close({name: before[name] - after[name] for name in expected}, expected)
    unchanged = before.keys() - expected.keys()
    assert all(np.array_equal(before[name], after[name]) for name in unchanged)
    assert any("vis" in name for name in expected)


@pytest.mark.slow
def test_steps_of_adamw_are_those_of_torch_with_clipping_and_weight_decay(tiny, tiny_model_dir, text_data, tmp_path):
    samples = [text_sample(length, seed) for seed, length in enumerate([9, 17, 5, 17])]
    with_nonzero_adapter(tiny, "a", text_data)
    tiny.save("a", tmp_path / "checkpoint")
    tiny.load("a", tmp_path / "checkpoint", with_optimizer=False)
    tiny.save_for_sampler("a", tmp_path / "adapter")
    model = peft_model(tiny_model_dir, tmp_path / "adapter")
    trained = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    optimizer = torch.optim.AdamW(trained, lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1)
    params = AdamParams(0.01, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)
    for _ in range(3):
        tiny.forward_backward("a", text_data, "cross_entropy")
        metrics = tiny.optim_step("a", params)
        optimizer.zero_grad()
        plain_gradients(model, samples, text_data)
        assert metrics["grad_norm"] == pytest.approx(float(torch.nn.utils.clip_grad_norm_(trained, 0.5)), rel=1e-4)
        assert metrics["grad_norm"] > 0.5
        optimizer.step()
    expected = plain_names({name: value.detach().numpy() for name, value in model.named_parameters()})
    for name, found in exported(tiny, "a", tmp_path / "after").items():
        np.testing.assert_allclose(found, expected[name], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_gradients_add_up_over_calls_until_a_step_and_do_not_depend_on_the_passes(tiny_model_dir, text_data, tmp_path):
    found = []
    for tokens, calls in ((10_000, [text_data]), (17, [text_data]), (34, [text_data[:1], text_data[1:]])):
        trainer = Trainer.from_pretrained(tiny_model_dir, device="cpu", tokens_per_pass=tokens)
        trainer.create_model("a", lora=SMALL)
        for call in calls:
            trainer.forward_backward("a", call, "cross_entropy")
        found.append(gradients(trainer, "a", tmp_path / str(len(found))))
        with pytest.raises(ArgumentError, match="has no gradients; call forward_backward"):
            trainer.optim_step("a", AdamParams())
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


def test_rows_are_divided_into_passes_within_both_budgets(monkeypatch):
    family = loaded_family("qwen3_vl")
    sizes = []
    hidden_states = ForwardPass.hidden_states

    def recorded(self, rows):
        grids = [each.item["image_grid_thw"] for each in rows.items]
        sizes.append((rows.input_ids.size, sum(int(np.prod(grid)) for grid in grids), len(rows.sequences)))
        return hidden_states(self, rows)

    monkeypatch.setattr(ForwardPass, "hidden_states", recorded)
    images = [family.row(str(n), [family.pixels(32, 32)]).sample for n in range(5)]
    data = [
        datum_from_sample(each, "cross_entropy")
        for each in (*images, text_sample(200, 1), *map(text_sample, [5] * 4, range(4)))
    ]
    trainer = Trainer.from_pretrained(family.directory, device="cpu", tokens_per_pass=300, patches_per_pass=40)
    trainer.create_model("a", lora=SMALL)
    trainer.forward("a", data, "cross_entropy")
    assert sum(rows for _, _, rows in sizes) == len(data)
    assert len(sizes) < len(data)
    assert all((tokens <= 300 and patches <= 40) or rows == 1 for tokens, patches, rows in sizes)
    assert max(patches for _, patches, _ in sizes) > 16, "several images in one pass"


@pytest.mark.slow
def test_adapters_do_not_change_each_other_nor_the_base_model(tiny, text_data, tmp_path):
    base = {name: value.clone() for name, value in tiny.model.state_dict().items()}
    tiny.create_model("a", lora=SMALL)
    tiny.create_model("b", lora=replace(SMALL, rank=2, seed=5))
    alone = tiny.forward("b", text_data, "cross_entropy").logprobs
    tiny.forward_backward("b", text_data[:1], "cross_entropy")
    for _ in range(2):
        tiny.forward_backward("a", text_data, "cross_entropy")
        tiny.optim_step("a", AdamParams(learning_rate=0.05))
    changed = tiny.forward("a", text_data, "cross_entropy").logprobs
    for one, other, of_a in zip(alone, tiny.forward("b", text_data, "cross_entropy").logprobs, changed, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.abs(one - of_a).max() > 0.1
    of_b = gradients(tiny, "b", tmp_path / "b")
    tiny.unload("b")
    tiny.create_model("b", lora=replace(SMALL, rank=2, seed=5))
    tiny.forward_backward("b", text_data[:1], "cross_entropy")
    assert_close(gradients(tiny, "b", tmp_path / "again"), of_b)
    state = tiny.model.state_dict()
    assert state.keys() == base.keys()
    assert all(torch.equal(state[name], base[name]) for name in base)


def storages():
    """Address and bytes of each storage of a tensor of this process."""
    gc.collect()
    tensors = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
    # A tensor that `torch.vmap` has wrapped has no storage, and an exception of another test may still hold one.
    storages = [each.untyped_storage() for each in tensors if torch._C._has_storage(each)]
    return {each.data_ptr(): each for each in storages}


@pytest.mark.slow
def test_an_adapter_that_waits_has_its_parameters_and_its_state_of_adamw_in_memory_and_no_more(
    tiny, text_data, tmp_path, request
):
    tiny.create_model("a", lora=EVERYWHERE)
    parameters = sum(value.nbytes for value in exported(tiny, "a", tmp_path / "a").values())
    tiny.unload("a")
    before = storages()  # held, so that what other tests left is not freed and its addresses are not used again
    gc.freeze()  # the objects of other tests, which `storages` need not go through again
    request.addfinalizer(gc.unfreeze)

    def added():
        return sum(each.nbytes() for address, each in storages().items() if address not in before)

    tiny.create_model("b", lora=EVERYWHERE)
    assert added() == parameters
    tiny.forward_backward("b", text_data, "cross_entropy")
    assert added() == 2 * parameters, "the gradients wait"
    tiny.optim_step("b", AdamParams())
    assert 3 * parameters < added() < 3 * parameters + 1000, "and a number of steps for each"
    tiny.unload("b")
    assert added() == 0


def test_the_seed_decides_the_initial_values_and_leaves_the_random_numbers_of_the_program(tiny, tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        tiny.create_model(name, lora=replace(SMALL, seed=seed))
    assert torch.equal(torch.rand(2), expected)
    a, b, c = (exported(tiny, name, tmp_path / name) for name in "abc")
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert any(not np.array_equal(a[name], c[name]) for name in a)
    tiny.create_model("d", lora=replace(SMALL, seed=None))
    tiny.create_model("e", lora=replace(SMALL, seed=None))
    d, e = (exported(tiny, name, tmp_path / name) for name in "de")
    assert any(not np.array_equal(d[name], e[name]) for name in d)


@pytest.mark.parametrize(
    ("option", "parts"),
    [("train_attn", {"self_attn"}), ("train_mlp", {"mlp"}), ("train_unembed", {"lm_head"})],
)
def test_the_options_name_the_layers_of_the_language_model_that_are_adapted(tiny, tmp_path, option, parts):
    chosen = {"train_attn": False, "train_mlp": False, "train_unembed": False, option: True}
    tiny.create_model("a", lora=LoraOptions(rank=2, **chosen))
    names = exported(tiny, "a", tmp_path / "a").keys()
    assert {part for name in names for part in ("self_attn", "mlp", "lm_head", "visual") if part in name} == parts


@pytest.mark.parametrize(("name", "option"), [("gpt_oss", "train_mlp"), ("mamba", "train_attn")])
def test_a_kind_of_layer_that_a_model_does_not_have_is_an_error(tmp_path, name, option):
    trainer = Trainer.from_pretrained(saved_text_model(name, tmp_path), device="cpu")
    with pytest.raises(UnsupportedModelError, match=rf"{option} names no torch.nn.Linear .* pass {option}=False"):
        trainer.create_model("a", lora=SMALL)
    trainer.create_model("a", lora=replace(EVERYWHERE, train_mlp=False, train_attn=option != "train_attn"))


def test_full_training_is_alone_and_unloading_it_restores_the_base_model(tiny, text_data):
    base = {name: value.clone() for name, value in tiny.model.state_dict().items()}
    tiny.create_model("a", lora=SMALL)
    with pytest.raises(ArgumentError, match="unload 'a' first"):
        tiny.create_model("all", lora=None)
    tiny.unload("a")
    tiny.create_model("all", lora=None)
    for lora in (None, SMALL):
        with pytest.raises(ArgumentError, match="unload 'all' first"):
            tiny.create_model("b", lora=lora)
    tiny.forward_backward("all", text_data, "cross_entropy")
    tiny.optim_step("all", AdamParams(learning_rate=0.01))
    assert any(not torch.equal(value, base[name]) for name, value in tiny.model.state_dict().items())
    tiny.unload("all")
    assert all(torch.equal(value, base[name]) for name, value in tiny.model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in tiny.model.parameters())
    tiny.create_model("b", lora=SMALL)
    assert tiny.models() == {"b": SMALL}


@pytest.mark.slow
def test_full_training_needs_float32_and_adapters_are_float32_over_any_base(tiny_model_dir, text_data, tmp_path):
    trainer = Trainer.from_pretrained(tiny_model_dir, device="cpu", dtype="bfloat16")
    with pytest.raises(ArgumentError, match=r"torch.bfloat16.*dtype=\"float32\""):
        trainer.create_model("all", lora=None)
    with_nonzero_adapter(trainer, "a", text_data, EVERYWHERE)
    assert {value.dtype for value in exported(trainer, "a", tmp_path / "a").values()} == {np.dtype(np.float32)}
    exact = Trainer.from_pretrained(tiny_model_dir, device="cpu")
    with_nonzero_adapter(exact, "a", text_data, EVERYWHERE)
    rounded, plain = (each.forward("a", text_data, "cross_entropy").logprobs[1] for each in (trainer, exact))
    np.testing.assert_allclose(rounded, plain, atol=0.2)


# What is refused, and changes nothing.


def with_input(datum, name, value):
    return replace(datum, inputs={**datum.inputs, name: value})


def not_a_number(datum):
    weights = datum.inputs["weights"].copy()
    weights[3] = np.nan
    return with_input(datum, "weights", weights)


def larger_image(datum):
    (item, placeholder), *others = datum.media
    return replace(datum, media=[(replace(item, num_tokens=item.num_tokens + 1), placeholder), *others])


WRONG_ROWS = {
    "no tokens": (lambda datum: replace(datum, token_ids=datum.token_ids[:0]), "it has no tokens"),
    "fewer targets": (
        lambda datum: replace(datum, target_ids=datum.target_ids[1:]),
        r"target_ids is int32 \(15,\); pass integers \(16,\)",
    ),
    "a list of ids": (lambda datum: replace(datum, token_ids=[1, 2]), "token_ids is a list; pass integers"),
    "an id beyond the vocabulary": (
        lambda datum: replace(datum, target_ids=np.full(len(datum), 10**6)),
        "target 0 is 1000000",
    ),
    "more tokens than the model reads": (
        lambda datum: Datum(np.full(10**5, 5), np.full(10**5, 5)),
        "it has 100000 tokens, and the model reads",
    ),
    "weights of another length": (
        lambda datum: with_input(datum, "weights", datum.inputs["weights"][1:]),
        r"weights is float32 \(15,\); pass numbers \(16,\)",
    ),
    "a weight that is not a number": (not_a_number, r"weights\[3\] is nan"),
}


@pytest.mark.parametrize("fault", WRONG_ROWS)
def test_a_wrong_row_is_an_error_with_its_index_that_changes_no_gradient(tiny, text_data, tmp_path, fault):
    change, reason = WRONG_ROWS[fault]
    tiny.create_model("a", lora=SMALL)
    tiny.forward_backward("a", text_data, "cross_entropy")
    wrong = [text_data[0], change(text_data[1]), text_data[2]]
    with pytest.raises(SampleError, match=rf"data\[1\].*{reason}"):
        tiny.forward_backward("a", wrong, "cross_entropy")
    with pytest.raises(SampleError, match=rf"data\[1\].*{reason}"):
        tiny.forward("a", wrong, "cross_entropy")
    tiny.create_model("b", lora=SMALL)
    tiny.forward_backward("b", text_data, "cross_entropy")
    assert_close(gradients(tiny, "a", tmp_path / "a"), gradients(tiny, "b", tmp_path / "b"))


def test_an_image_of_another_number_of_tokens_is_an_error_with_the_index_of_its_row():
    family = loaded_family("qwen3_vl")
    datum = datum_from_sample(family.row("one", [family.pixels(32, 48)]).sample, "cross_entropy")
    trainer = Trainer.from_pretrained(family.directory, device="cpu")
    trainer.create_model("a", lora=SMALL)
    with pytest.raises(SampleError, match=r"data\[1\].*has \d+ tokens, but \d+ feature tokens"):
        trainer.forward_backward("a", [datum, larger_image(datum)], "cross_entropy")


def test_a_failure_in_the_middle_leaves_the_gradients_as_they_were(tiny_model_dir, text_data, tmp_path, monkeypatch):
    trainer = Trainer.from_pretrained(tiny_model_dir, device="cpu", tokens_per_pass=17)
    for name in "ab":
        trainer.create_model(name, lora=SMALL)
        trainer.forward_backward(name, text_data[:2], "cross_entropy")
    hidden_states, calls = ForwardPass.hidden_states, []

    def out_of_memory(self, rows):
        calls.append(rows)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("planted")
        return hidden_states(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(ForwardPass, "hidden_states", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            trainer.forward_backward("a", text_data, "cross_entropy")
    assert len(calls) == 3
    assert_close(gradients(trainer, "a", tmp_path / "a"), gradients(trainer, "b", tmp_path / "b"))


def test_gradients_that_are_not_finite_change_no_parameter(tiny, text_data, tmp_path):
    tiny.create_model("a", lora=SMALL)
    before = exported(tiny, "a", tmp_path / "before")
    huge = with_input(text_data[0], "weights", np.full(len(text_data[0]), 3e38, np.float32))
    tiny.forward_backward("a", [huge], "cross_entropy")
    with pytest.raises(ArgumentError, match="norm of the gradients of 'a' is"):
        tiny.optim_step("a", AdamParams())
    after = exported(tiny, "a", tmp_path / "after")
    assert all(np.array_equal(before[name], after[name]) for name in before)
    tiny.forward_backward("a", text_data, "cross_entropy")
    assert np.isfinite(tiny.optim_step("a", AdamParams())["grad_norm"])


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda trainer, data: trainer.forward("b", data, "ppo"), r"model_id is 'b'; no such model.*there are: 'a'"),
        (
            lambda trainer, data: trainer.forward("a", data, "reinforce"),
            "loss is 'reinforce'; pass one of cross_entropy",
        ),
        (lambda trainer, data: trainer.forward("a", [], "cross_entropy"), "data is"),
        (lambda trainer, data: trainer.create_model("a", lora=SMALL), "the id of no other model"),
        (lambda trainer, data: trainer.create_model("", lora=SMALL), "the id of no other model"),
        (lambda trainer, data: trainer.unload("c"), "model_id is 'c'"),
    ],
)
def test_wrong_arguments_are_errors_that_name_them(tiny, text_data, call, reason):
    tiny.create_model("a", lora=SMALL)
    with pytest.raises(ArgumentError, match=reason):
        call(tiny, text_data)
