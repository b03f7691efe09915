"""Sounds as a server takes them: tensors in vLLM's layout, WAV files, and what is refused before it ends a server."""

import dataclasses
import io

import engine_inputs
import numpy as np
import pytest
import soundfile
import soxr

from renderers import MediaItem, MediaSource, MultiModalData, PlaceholderRange
from renderers.media.item import ExpansionPiece, TensorField
from renderers.media.policy import MediaPolicy
from renderers.media.samples import samples_source
from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.http.source_files import source_file
from rollouts.engines.vllm.feature_decoding import DecodedTensor
from rollouts.engines.vllm.media_payload import ContentPartsPayload, media_payload
from rollouts.engines.vllm.request_checks import check_request
from rollouts.engines.vllm.sounds import in_server_layout, sound_format
from rollouts.engines.vllm.tensors import ServerTensor
from rollouts.errors import CapabilityError, InvalidRequestError

AUDIO_ID = 269
random = np.random.default_rng(0)


def sound(frames=100, tokens=25, *, window=3000, source=None, **more):
    """As transformers' processors of Whisper's family make it."""
    mask = np.zeros(window, np.int64)
    mask[:frames] = 1
    tensors = {"input_features": random.normal(size=(128, window)).astype(np.float32), "feature_attention_mask": mask}
    fields = {name: TensorField("batched") for name in tensors}
    source = source or samples_source(np.zeros(160 * frames, np.int16), 16_000, MediaPolicy())
    name = f"sound-{random.integers(2**62)}"
    return MediaItem("audio", name, source, tensors, tokens, None, fields, sampling_rate=16_000, **more)


def decoded(array, kind="batched", keep_on_cpu=False, dim=0):
    raw = np.frombuffer(array.tobytes(), np.uint8)
    tensor = ServerTensor(str(array.dtype), array.shape, raw, keep_on_cpu, dim)
    return DecodedTensor(tensor, TensorField(kind), str(array.dtype))


def whisper_format():
    """Qwen2-Audio of vLLM 0.32: the tensors of transformers."""
    rendered = sound()
    mask = rendered["feature_attention_mask"].astype("i4")
    tensors = {"input_features": decoded(rendered["input_features"]), "feature_attention_mask": decoded(mask)}
    return sound_format(tensors, 25)


def omni_format():
    """Qwen2.5-Omni of vLLM 0.32: frames without padding, joined along time."""
    rendered = sound()
    return sound_format(
        {
            "input_audio_features": decoded(rendered["input_features"][:, :100], "flat", dim=1),
            "feature_attention_mask": decoded(rendered["feature_attention_mask"].astype("i4"), keep_on_cpu=True),
            "audio_feature_lengths": decoded(np.array(100), keep_on_cpu=True),
        },
        25,
    )


def server(sounds, **more):
    ids = {"audio": AUDIO_ID}
    fields = {"merge_area": None, "patch_values": None, "placeholder_ids": ids, "max_model_len": 2000}
    return dataclasses.replace(engine_inputs.SERVER, **{"pixel_dtype": None, **fields, "sounds": sounds, **more})


def request(*items):
    ids, placed = [5], []
    for item in items:
        placed.append((item, PlaceholderRange(len(ids), item.num_tokens)))
        ids += [AUDIO_ID] * item.num_tokens + [7]
    media = MultiModalData.from_items(placed)
    return GenerateRequest(ids, SamplingParams(max_tokens=1), media, placeholder_token_ids={"audio": AUDIO_ID})


# Layouts.


def test_a_server_that_joins_sounds_along_time_gets_frames_without_padding_and_their_number():
    item = sound(260, 65)
    sent = in_server_layout(item, omni_format())
    assert np.array_equal(sent["input_audio_features"], item["input_features"][:, :260])
    assert sent["audio_feature_lengths"].tolist() == 260
    assert sent.fields == {
        "input_audio_features": TensorField("flat"),
        "feature_attention_mask": TensorField("batched"),
        "audio_feature_lengths": TensorField("batched"),
    }


def test_a_server_of_bfloat16_gets_features_of_half_the_bytes():
    fields = whisper_format().fields
    in_bfloat16 = {**fields, "input_features": fields["input_features"]._replace(dtype="bfloat16")}
    item = sound()
    sent = in_server_layout(item, dataclasses.replace(whisper_format(), fields=in_bfloat16))
    assert sent.tensors["input_features"].nbytes == item["input_features"].nbytes / 2
    assert np.allclose(sent["input_features"], item["input_features"], rtol=2**-8)


@pytest.mark.parametrize("name", ["input_features_padded", "chunk_counts", "audio_embed_sizes"])
def test_what_vllm_names_or_counts_in_its_own_way_is_made_of_what_the_processor_returned(name):
    windows = random.normal(size=(2, 128, 30)).astype(np.float32)
    item = dataclasses.replace(
        sound(), tensors={"input_features": windows}, fields={"input_features": TensorField("flat")}
    )
    own = {"input_features_padded": windows, "chunk_counts": np.array(1), "audio_embed_sizes": np.array(25)}[name]
    sent = in_server_layout(item, sound_format({name: decoded(own)}, 25))
    expected = {"input_features_padded": windows, "chunk_counts": 2, "audio_embed_sizes": 25}[name]
    assert np.array_equal(sent[name], expected)


def test_unknown_tensors_of_a_server_are_no_reason_to_guess():
    unknown = sound_format({"audio_arrays": decoded(np.zeros(16_000, np.float32))}, 25)
    assert in_server_layout(sound(), unknown) is None
    payload = media_payload(request(sound()), "auto", server(unknown))
    assert isinstance(payload, ContentPartsPayload)
    with pytest.raises(CapabilityError, match=r'audio_arrays.*Use media="content_parts"'):
        media_payload(request(sound()), "features", server(unknown))


# What would end a server, or give garbage.


@pytest.mark.parametrize("make", [whisper_format, omni_format])
@pytest.mark.parametrize(
    ("item", "error"),
    [
        (sound(100, 24), "24 tokens for 100 frames, of which the model makes 25"),
        (sound(104, 25), "25 tokens for 104 frames, of which the model makes 26"),
    ],
)
def test_a_sound_with_other_tokens_than_its_frames_make_is_not_sent(make, item, error):
    with pytest.raises(InvalidRequestError, match=error):
        media_payload(request(item), "auto", server(make()))


def test_features_outside_of_the_window_of_the_model_are_not_sent():
    with pytest.raises(InvalidRequestError, match=r"\(128, 2900\), the server's own of another sound \(128, 3000\)"):
        media_payload(request(sound(window=2900)), "features", server(whisper_format()))
    media_payload(request(sound(window=2900)), "features", server(omni_format()))


# Files.


def file_of(item):
    return source_file(item.source, "audio", sampling_rate=item.sampling_rate)


def mono(samples, rate):
    return samples if rate == 16_000 else soxr.resample(samples, rate, 16_000, quality="HQ")


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [16_000, 44_100])
@pytest.mark.parametrize("dtype", ["int16", "float32"])
def test_the_file_of_a_sound_has_the_samples_of_the_processor(channels, rate, dtype):
    floats = random.uniform(-0.5, 0.5, (2000, channels)).astype(np.float32)
    given = floats if dtype == "float32" else (floats * 2**15).astype(np.int16)
    item = sound(source=samples_source(given, rate, MediaPolicy()))
    samples, sampling_rate = soundfile.read(io.BytesIO(file_of(item).data), dtype="float32")
    expected = given if dtype == "float32" else given.astype(np.float32) / 2**15
    assert sampling_rate == 16_000
    assert np.array_equal(samples, mono(expected.mean(axis=1, dtype=np.float32), rate))


def test_a_wav_that_every_decoder_reads_alike_is_sent_as_it_is_and_other_files_are_not():
    def item(samples, rate, **format):
        file = io.BytesIO()
        soundfile.write(file, samples, rate, **format)
        return sound(source=MediaSource.of(file.getvalue()))

    tone = (np.sin(np.arange(3200) / 20) * 0.3).astype(np.float32)
    as_it_is = item(tone, 16_000, format="WAV", subtype="PCM_16")
    assert file_of(as_it_is).data is as_it_is.source.data
    for other in (
        item(tone, 8_000, format="WAV", subtype="PCM_16"),
        item(np.stack([tone, tone], 1), 16_000, format="WAV", subtype="PCM_16"),
        item(tone, 16_000, format="WAV", subtype="ULAW"),
        item(tone, 16_000, format="MP3"),
    ):
        made = file_of(other)
        assert made.data is not other.source.data
        assert file_of(other) is made  # made once for all servers
        assert soundfile.info(io.BytesIO(made.data)).subtype == "FLOAT"


# Servers that do not hear.


@pytest.mark.parametrize("mode", ["features", "content_parts", "auto"])
def test_a_server_that_takes_no_sounds_is_named_with_its_reason_and_the_cure(mode):
    deaf = server(None, sound_refusal="At most 0 audio(s) may be provided in one prompt")
    with pytest.raises(CapabilityError, match=r"At most 0 audio.*--limit-mm-per-prompt"):
        media_payload(request(sound()), mode, deaf)


def test_a_video_with_its_sound_is_refused_by_name_however_it_would_be_sent():
    """The API has one range for each medium and no mask, and would decode the frames of a file alone."""
    video_id, pieces = 270, [("v", 4, True), ("s", 2, "audio"), ("v", 4, True), ("s", 1, "audio")]
    expansion = tuple(ExpansionPiece(*piece) for piece in pieces)
    film = MediaItem("video", "film", MediaSource.of(b"film"), {}, 11, None, {}, expansion, 16_000)
    ids = [token for text, times, _ in pieces for token in [video_id if text == "v" else AUDIO_ID] * times]
    media = MultiModalData.from_items([(film, PlaceholderRange(1, 11))])
    asked = GenerateRequest([5, *ids, 7], SamplingParams(max_tokens=1), media)
    takes_both = server(omni_format(), pixel_dtype="uint8", placeholder_ids={"audio": AUDIO_ID, "video": video_id})
    with pytest.raises(InvalidRequestError, match=r"use_audio_in_video.*Sample with LocalEngine"):
        check_request(asked, takes_both)
