"""Items that HFProcessor makes of one sound at a time are what the processors of transformers make of them."""

import functools
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import audio_families
import numpy as np
import pytest
import soundfile
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from processor_outputs import TEXT_KEYS, check_equal, with_expansions
from transformers import ProcessorMixin
from transformers.audio_utils import load_audio

from renderers import MediaPolicy, MediaSource, MediaStore, load_renderer
from renderers.errors import LoadError, MediaError
from renderers.media.item import MediaItem
from renderers.media.samples import samples_source
from renderers.process.fork_reset import ProcessLock
from renderers.vision.batching import batch_tensors
from renderers.vision.hf_probing import Layout, probe
from renderers.vision.hf_processor import HFProcessor, load_hf_processors
from renderers.vision.hf_runner import ProcessorRunner
from renderers.vision.sound_lengths import SoundLengths

pytestmark = pytest.mark.usefixtures("one_torch_thread")

#: Those whose batches hold exactly the tensors of single sounds, padded.
STACKED = ("qwen2_audio", "qwen2_5_omni", "gemma4_unified", "inkling", "vibevoice_asr")
#: Those that cut a sound into windows: an item has a row for each.
WINDOWS = ("audio_flamingo3", "glm_asr", "moss")
#: Those whose frames of padding, or last frames of a sound, depend on what is behind it in a batch.
PADDED_FIRST = ("qwen3_omni", "gemma3n", "gemma4", "phi4_multimodal", "qwen3_asr", "nemotron_h_omni")


@pytest.fixture(scope="module")
def families() -> Callable[[str], tuple[ProcessorMixin, HFProcessor]]:
    """By the name of a family: the processor of transformers, and the `HFProcessor` of its sounds."""

    @functools.cache
    def load(name: str) -> tuple[ProcessorMixin, HFProcessor]:
        reference = audio_families.FAMILIES[name]()
        runner = ProcessorRunner(reference, "audio", reference.audio_token, ProcessLock())
        layout = probe(runner, min_frames=1, embed_tokens=())
        return reference, HFProcessor(runner, layout, fingerprint=name, policy=MediaPolicy(), store=MediaStore())

    return load


def sound(seconds: float, rate: int) -> np.ndarray:
    count = round(seconds * rate)
    return np.random.default_rng(count).uniform(-1, 1, count).astype(np.float32)


def items_of(processor: HFProcessor, sounds: Sequence[np.ndarray], rate: int) -> list[MediaItem]:
    return [processor.process(samples_source(each, rate, MediaPolicy())) for each in sounds]


def output_of(reference: Any, texts: Sequence[str], sounds: Sequence[np.ndarray], rate: int) -> dict[str, Any]:
    """What the processor of transformers makes of these texts with these sounds together."""
    audio = {"sampling_rate": rate, "return_tensors": "pt"}
    text = {"padding": True, "padding_side": "right", "return_tensors": "pt"}
    return dict(reference(text=list(texts), audio=list(sounds), audio_kwargs=audio, text_kwargs=text))


def features(output: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in output.items() if name not in TEXT_KEYS}


@pytest.mark.parametrize("name", [*STACKED, *WINDOWS])
def test_sounds_of_any_lengths_have_the_ids_and_features_of_the_models_own_processor(name: str, families: Any) -> None:
    reference, processor = families(name)
    rate, marker = reference._audio_processor.sampling_rate, processor.marker

    @given(st.lists(st.floats(0.1, 4), min_size=1, max_size=3))
    @settings(max_examples=2, deadline=None)
    def check(lengths: list[float]) -> None:
        sounds = [sound(length, rate) for length in lengths]
        items = items_of(processor, sounds, rate)
        texts = [f"Hear\n{marker}\n ?"] * len(sounds)
        theirs = output_of(reference, texts, sounds, rate)
        check_equal(batch_tensors(items), features(theirs))
        for text, item, ids in zip(texts, items, theirs["input_ids"].tolist(), strict=True):
            ours = reference.tokenizer(with_expansions(text, [item], marker))["input_ids"]
            assert ours == ids[: len(ours)]
            assert set(ids[len(ours) :]) <= {reference.tokenizer.pad_token_id}

    check()


@pytest.mark.parametrize("name", PADDED_FIRST)
def test_items_are_those_of_a_sound_alone_where_its_frames_depend_on_the_batch(name: str, families: Any) -> None:
    reference, processor = families(name)
    rate, marker = reference._audio_processor.sampling_rate, processor.marker
    sounds = [sound(length, rate) for length in (0.05, 1.234, 2.5)]
    items = items_of(processor, sounds, rate)
    for item, each in zip(items, sounds, strict=True):
        theirs = output_of(reference, [marker], [each], rate)
        check_equal({name: t for name, t in batch_tensors([item]).items() if name in theirs}, features(theirs))
        assert (
            reference.tokenizer(with_expansions(marker, [item], marker))["input_ids"] == theirs["input_ids"][0].tolist()
        )

    # In a batch, what follows a sound is zero and marked as padding; the processor's own batch is another one.
    ours, theirs = batch_tensors(items), features(output_of(reference, [marker] * 3, sounds, rate))
    assert {n: t.shape for n, t in ours.items()} == {n: tuple(t.shape) for n, t in theirs.items()}
    assert any(ours[n].tobytes() != theirs[n].numpy().tobytes() for n in ours)
    mask = next(n for n in ours if n.endswith("mask"))
    rows = next(n for n in ours if ours[n].ndim > 2)
    frames = np.moveaxis(ours[rows], ours[rows].shape[1:].index(ours[mask].shape[1]) + 1, 1)
    alone = items[0][mask].shape[0]
    assert not ours[mask][0, alone:].any()
    assert not frames[0, alone:].any()


FILES = ("qwen2_audio", "qwen3_omni", "gemma3n", "phi4_multimodal", "audio_flamingo3", "nemotron_h_omni")
_RATES = (8000, 11025, 16000, 22050, 44100, 48000)


def recorded(kind: str, seconds: float, rate: int, channels: int) -> np.ndarray:
    shape = (round(seconds * rate), channels)
    noise = np.random.default_rng(shape).uniform(-1, 1, shape)
    return {"noise": noise / 2, "clipped": np.clip(8 * noise, -1, 1), "silence": np.zeros(shape)}[kind]


@pytest.mark.slow
def test_files_of_any_rate_and_channels_have_the_features_that_transformers_makes_of_them(
    families: Any, tmp_path: Path
) -> None:
    @given(
        st.sampled_from(FILES),
        st.sampled_from(["noise", "clipped", "silence"]),
        st.floats(0.05, 2),
        st.sampled_from(_RATES),
        st.sampled_from([1, 2]),
        st.sampled_from(["PCM_16", "FLOAT"]),
    )
    @settings(max_examples=10, deadline=None)
    def check(name: str, kind: str, seconds: float, rate: int, channels: int, subtype: str) -> None:
        reference, processor = families(name)
        path = tmp_path / "sound.wav"
        soundfile.write(path, recorded(kind, seconds, rate, channels), rate, subtype=subtype)
        item = processor.process(MediaSource.of(path.read_bytes()))
        heard = load_audio(str(path), 16000, backend="soundfile")
        theirs = output_of(reference, [processor.marker], [heard], 16000)
        check_equal({name: t for name, t in batch_tensors([item]).items() if name in theirs}, features(theirs))
        embed_id = reference.tokenizer.convert_tokens_to_ids(processor.embed_token)
        assert item.num_tokens == theirs["input_ids"][0].tolist().count(embed_id)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWS)
def test_a_sound_longer_than_the_window_of_a_model_has_a_row_for_each_window(name: str, families: Any) -> None:
    reference, processor = families(name)
    sounds = [sound(length, 16000) for length in (61.0, 0.5, 30.0)]
    items = items_of(processor, sounds, 16000)
    assert [len(item["input_features"]) for item in items] == [3, 1, 1]
    theirs = output_of(reference, [processor.marker] * 3, sounds, 16000)
    check_equal(batch_tensors(items), features(theirs))


def layout_with(fault: Callable[[dict[str, Any]], None]) -> Layout:
    """The layout of Qwen3-Omni's sounds, with a fault planted in what its processor returns for several."""

    class Faulty(transformers.Qwen3OmniMoeProcessor):
        def __call__(self, **options: Any) -> Any:
            output = super().__call__(**options)
            if len(output["input_features"]) > 1:
                fault(output.data)
            return output

    real = audio_families.FAMILIES["qwen3_omni"]()
    faulty = Faulty(real.image_processor, real.video_processor, real.feature_extractor, real.tokenizer)
    return probe(ProcessorRunner(faulty, "audio", "<|audio_pad|>", ProcessLock()), min_frames=1, embed_tokens=())


def test_features_that_depend_on_another_sound_of_the_same_length_are_refused() -> None:
    def fault(output: dict[str, Any]) -> None:
        output["input_features"] = output["input_features"] - output["input_features"].mean()

    with pytest.raises(LoadError, match=r"Faulty returns 'input_features'.*depend on the rest of the batch"):
        layout_with(fault)


@pytest.mark.slow
def test_the_fingerprint_of_sounds_follows_the_settings_of_the_extractor(tmp_path: Path) -> None:
    def fingerprint(name: str, **changes: Any) -> str:
        audio_families.save("qwen2_audio", tmp_path / name)
        file = tmp_path / name / "processor_config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "feature_extractor": {**config["feature_extractor"], **changes}}))
        return load_hf_processors(tmp_path / name, policy=MediaPolicy(), store=MediaStore())["audio"].fingerprint

    assert fingerprint("one") == fingerprint("same") != fingerprint("other", chunk_length=10, n_samples=160_000)


@pytest.mark.slow
def test_a_sound_whose_end_the_processor_would_leave_out_is_refused_with_its_length(families: Any) -> None:
    reference, processor = families("qwen2_audio")
    whole, longer = sound(30, 16000), sound(30.0001, 16000)
    assert output_of(reference, ["<|AUDIO|>"], [longer], 16000)["input_features"].shape == (1, 128, 3000)  # no error
    assert items_of(processor, [whole], 16000)[0].num_tokens == 750
    with pytest.raises(
        MediaError, match=r"Qwen2AudioProcessor reads the first 30 s .*; this one has 30\.00\d* s. Split"
    ):
        items_of(processor, [longer], 16000)


def test_the_length_that_a_processor_reads_is_found_to_the_sample() -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=3)
    reference = audio_families.FAMILIES["qwen2_audio"]()
    reference.feature_extractor = extractor
    lengths = SoundLengths(ProcessorRunner(reference, "audio", "<|AUDIO|>", ProcessLock()))
    lengths.check(48_000, "digest", "audio")
    with pytest.raises(MediaError, match="reads the first 3 s"):
        lengths.check(48_001, "digest", "audio")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_does_not_wait_for_the_threads_of_torch_in_its_parent(families: Any) -> None:
    _, processor = families("qwen2_audio")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        items_of(processor, [sound(3, 16000)], 16000)  # torch now has its threads
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                os._exit(7 if items_of(processor, [sound(4, 16000)], 16000)[0].num_tokens == 100 else 1)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    finally:
        torch.set_num_threads(threads)


def test_the_error_of_a_directory_for_mistral_common_names_the_server_as_the_cure(tmp_path: Path) -> None:
    for name, text in {"config.json": '{"model_type": "voxtral"}', "tekken.json": "{}"}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(LoadError, match=r"holds no tokenizer.json.*tekken.json is for mistral.*inference server"):
        load_renderer(tmp_path)
