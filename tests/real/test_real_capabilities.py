"""The probe of a server's capabilities, against real servers in every mode."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.vllm.capabilities import ServerCapabilities, probe
from rollouts.errors import CapabilityError

PIXELS = {
    "float32": "uint8",
    "float32-host-normalise": "float32",
    "bfloat16": "uint8",
    "bfloat16-host-normalise": "bfloat16",
}


@pytest.fixture
async def connection(vllm_server):
    connection = ServerConnection(vllm_server.base_url, api_key=vllm_server.api_key)
    yield connection
    await connection.close()


@pytest.mark.parametrize("vllm_server", PIXELS, indirect=True)
async def test_a_server_of_each_mode_is_known_after_one_probe(vllm_server, connection):
    image_token = AutoConfig.from_pretrained(vllm_server.model_dir).image_token_id
    found = await probe(connection)
    assert "audio" in found.sound_refusal
    assert replace(found, sound_refusal=None) == ServerCapabilities(
        version="0.32.0",
        model=vllm_server.model_name,
        max_model_len=4096,
        scale_out=True,
        pixel_dtype=PIXELS[vllm_server.mode],
        placeholder_ids={"image": image_token},
        merge_area=4,
        patch_values=384,  # 3 channels, 2 frames, 8 x 8 pixels
        image_fields={"pixel_values": "flat", "image_grid_thw": "batched"},
        control=True,
    )
    assert await probe(connection) == found  # also the second time, when its processor has a cache


async def test_the_probe_runs_no_request(vllm_server, connection):
    async def prompts():
        reply = await connection.request("GET", "/metrics", name="metrics")
        lines = [line for line in reply.body.decode().splitlines() if line.startswith("vllm:request_success_total")]
        return [line for line in lines if not line.endswith(" 0.0")]

    before = await prompts()
    await probe(connection)
    assert await prompts() == before


async def test_a_paused_server_can_be_probed(vllm_server, connection):
    await connection.request("POST", "/pause", name="pause")
    try:
        assert (await probe(connection)).control
    finally:
        await connection.request("POST", "/resume", name="resume")


@pytest.mark.parametrize("vllm_server", ["closed"], indirect=True)
async def test_the_errors_of_a_closed_server_name_what_to_turn_on(vllm_server, connection):
    for key in (None, "guessed-secret"):
        stranger = ServerConnection(vllm_server.base_url, api_key=key)
        with pytest.raises(CapabilityError, match="API key") as caught:
            await probe(stranger)
        assert "secret" not in str(caught.value)
        await stranger.close()
    with pytest.raises(CapabilityError, match="--enable-scale-out"):
        await probe(connection)
    found = await probe(connection, needs_generate=False)
    assert (found.scale_out, found.control, found.pixel_dtype) == (False, False, None)
    assert found.max_model_len == 4096


@pytest.mark.parametrize("vllm_server", ["render"], indirect=True)
async def test_a_render_server_is_no_engine_but_reports_its_pixel_dtype(vllm_server, connection):
    with pytest.raises(CapabilityError, match=r"has no /inference/v1/generate \(HTTP 404\)"):
        await probe(connection)
    found = await probe(connection, needs_generate=False)
    assert (found.scale_out, found.control, found.pixel_dtype) == (False, False, "uint8")
