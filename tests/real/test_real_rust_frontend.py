"""vLLM's Rust frontend before the CPU engine: images, aborts, samples, control calls and doctor."""

import io
import json
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import typer
from PIL import Image
from reference import Reference
from test_real_engine import prompt, request_for
from typer.testing import CliRunner

from renderers import load_renderer
from rollouts import SamplingParams
from rollouts.cli.doctor.command import doctor
from rollouts.engines.vllm import VLLMEngine, capabilities
from rollouts.engines.vllm.probe_requests import ServerVersion
from rollouts.errors import CapabilityError, ServerError

ANY_RUST = pytest.mark.parametrize("vllm_server", ["rust", "rust-closed"], indirect=True)
RUST = pytest.mark.parametrize("vllm_server", ["rust"], indirect=True)
CLOSED = pytest.mark.parametrize("vllm_server", ["rust-closed"], indirect=True)


@pytest.fixture(scope="module")
def reference(vllm_server):
    return Reference(vllm_server.model_dir)


# Images.


def smooth(height: int, width: int, channels: int) -> np.ndarray:
    """A photo's kind of content, on which JPEG decoders differ in their last bits: uint8 (height, width, channels)."""
    row, column, channel = np.mgrid[:height, :width, :channels]
    waves = (np.sin(row / 7 + channel) * np.cos(column / 11 - channel) + 1) * 100
    return (waves + np.random.default_rng(0).integers(0, 50, waves.shape)).clip(0, 255).astype(np.uint8)


def encoded(image: Image.Image, form: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png_of_16_bits() -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = smooth(150, 210, 3).astype(">u2") * 257 - 100
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    head = struct.pack(">IIBBBBB", 210, 150, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


PHOTO = Image.fromarray(smooth(150, 210, 3))
TURNED = Image.Exif()
TURNED[0x0112] = 6
SOURCES = {
    "PNG": encoded(PHOTO, "PNG"),
    "JPEG": encoded(PHOTO, "JPEG", quality=85),
    "JPEG of full colour": encoded(PHOTO, "JPEG", quality=95, subsampling=0),
    "progressive JPEG": encoded(PHOTO, "JPEG", progressive=True),
    "grey JPEG": encoded(PHOTO.convert("L"), "JPEG"),
    "CMYK JPEG": encoded(PHOTO.convert("CMYK"), "JPEG"),
    "WebP": encoded(PHOTO, "WEBP", quality=80),
    "RGBA": encoded(Image.fromarray(smooth(150, 210, 4)), "PNG"),
    "grey": encoded(PHOTO.convert("L"), "PNG"),
    "palette": encoded(PHOTO.convert("P"), "PNG"),
    "16-bit grey": encoded(Image.fromarray(smooth(150, 210, 1)[..., 0].astype(np.uint16) * 250 + 77), "PNG"),
    "16-bit RGB": png_of_16_bits(),
    "JPEG turned by EXIF": encoded(PHOTO, "JPEG", exif=TURNED),
    "PNG turned by EXIF": encoded(PHOTO, "PNG", exif=TURNED),
    "GIF": encoded(PHOTO.convert("P"), "GIF"),
    "resized": encoded(Image.fromarray(smooth(700, 1300, 3)), "JPEG"),
}


async def mismatch(engine, renderer, reference, data: bytes) -> float:
    """The largest difference of log-probabilities between a server and transformers, for an image of these bytes."""
    parts = [{"type": "image", "image": data}, {"type": "text", "text": "x"}]
    rendered = renderer.render([{"role": "user", "content": parts}], add_generation_prompt=True)
    (completion,) = (await engine.generate(request_for(rendered, max_tokens=8))).completions
    return float(np.abs(completion.logprobs - reference.logprobs(rendered, completion.token_ids)).max())


@pytest.mark.parametrize("vllm_server", ["float32", "rust", "rust-closed"], indirect=True)
@pytest.mark.parametrize("name", SOURCES)
async def test_log_probabilities_are_those_of_the_pixels_that_the_trainer_decodes(
    vllm_server, renderer, reference, name
):
    for media in ("content_parts", "auto"):
        async with VLLMEngine(vllm_server.base_url, api_key=vllm_server.api_key, media=media) as engine:
            for _ in range(2):  # the second time from the caches of the server
                assert await mismatch(engine, renderer, reference, SOURCES[name]) < 1e-5


@RUST
async def test_the_planted_mistake_a_jpeg_that_this_frontend_decodes_gives_other_log_probabilities(
    vllm_server, renderer, reference, monkeypatch
):
    async with VLLMEngine(vllm_server.base_url, jpeg_as_file=True) as engine:
        capabilities = await engine.capabilities()
        assert await mismatch(engine, renderer, reference, SOURCES["JPEG"]) < 1e-5  # nevertheless sent as PNG
        python = replace(capabilities, rust_frontend=None)  # so that it is sent as it is

        async def mistaken():
            return python

        monkeypatch.setattr(engine._capabilities, "get", mistaken)
        assert await mismatch(engine, renderer, reference, SOURCES["JPEG"]) > 1e-4


async def test_a_jpeg_may_go_unchanged_to_a_server_with_the_decoders_of_the_trainer(vllm_server, renderer, reference):
    async with VLLMEngine(vllm_server.base_url, media="content_parts", jpeg_as_file=True) as engine:
        assert await mismatch(engine, renderer, reference, SOURCES["JPEG"]) < 1e-5


@RUST
async def test_features_are_refused(vllm_server, renderer):
    request = request_for(prompt(renderer, smooth(60, 80, 3)))
    async with VLLMEngine(vllm_server.base_url, media="features") as engine:
        with pytest.raises(CapabilityError, match="drops features"):
            await engine.generate(request)


@RUST
async def test_it_is_known_by_how_it_refuses_a_request_where_its_version_is_hidden(vllm_server, monkeypatch):
    async def hidden(connection):
        return ServerVersion(None)

    monkeypatch.setattr(capabilities, "server_version", hidden)
    async with VLLMEngine(vllm_server.base_url) as engine:
        found = await engine.capabilities()
    assert found.rust_frontend == "unknown"


@RUST
async def test_an_image_that_makes_the_request_too_large_names_the_limit(vllm_server, engine, renderer):
    noise = np.random.default_rng(0).integers(0, 256, (3000, 3000, 3), dtype=np.uint8)
    with pytest.raises(ServerError, match="VLLM_HTTP_MAX_REQUEST_BODY_SIZE"):
        await engine.generate(request_for(prompt(renderer, noise)))


@CLOSED
async def test_an_abort_by_id_that_is_not_there_is_an_error(vllm_server, engine):
    with pytest.raises(CapabilityError, match="VLLM_SERVER_DEV_MODE=1"):
        await engine.control.abort(["mine"])


# Control calls.


@RUST
async def test_a_pause_that_the_engine_behind_it_lacks_is_an_error_and_no_weights_are_loaded(vllm_server, engine):
    with pytest.raises(CapabilityError, match="from one release"):
        await engine.control.pause("abort")
    with pytest.raises(CapabilityError, match="from one release"):
        await engine.update_weights(vllm_server.model_dir, "v2")
    assert not await engine.control.is_paused()
    assert await engine.served_version() == "default"
    assert engine.weight_version == "default"
    (completion,) = (await engine.generate(request_for(prompt_of_text(vllm_server)))).completions
    assert {span.version for span in completion.weight_spans} == {"default"}


def prompt_of_text(server):
    return prompt(load_renderer(server.model_dir), text="abc")


@RUST
async def test_sleeping_and_waking_up_are_there(vllm_server, engine):
    await engine.control.sleep(1)
    try:
        assert await engine.control.is_sleeping()
    finally:
        await engine.control.wake_up()
    assert not await engine.control.is_sleeping()
    assert len((await engine.generate(request_for(prompt_of_text(vllm_server)))).completions) == 1


@CLOSED
async def test_without_development_mode_control_calls_name_it(vllm_server, engine):
    for call in (engine.control.pause(), engine.control.sleep(), engine.control.reset_mm_cache()):
        with pytest.raises(CapabilityError, match="VLLM_SERVER_DEV_MODE=1"):
            await call


# Doctor.


@ANY_RUST
def test_doctor_names_the_frontend_and_blames_no_flag_that_it_does_not_need(vllm_server, monkeypatch):
    app = typer.Typer()
    app.command()(doctor)
    monkeypatch.setenv("KEY", vllm_server.api_key or "")
    key = ["--api-key-env", "KEY"] if vllm_server.api_key else []
    result = CliRunner().invoke(app, [vllm_server.base_url, "--model", str(vllm_server.model_dir), "--json", *key])
    found = json.loads(result.stdout)["findings"]
    assert {name for name, one in found.items() if one["outcome"] == "failed"} == set()
    assert "Rust frontend 0.33.0" in found["server"]["seen"]
    assert "--enable-scale-out" not in result.stdout
    for name in ("token endpoint", "text request", "image request", "mismatch"):
        assert found[name]["outcome"] == "ok", found[name]
    assert result.exit_code == 0


@RUST
async def test_sampling_options_of_the_protocol_are_taken(vllm_server, engine, renderer):
    rendered = prompt(renderer, text="abc")
    sampling = SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9, top_k=5, seed=2, stop_token_ids=(9,))
    request = request_for(rendered)
    (completion,) = (await engine.generate(replace(request, sampling=sampling))).completions
    assert 1 <= len(completion.token_ids) <= 4
