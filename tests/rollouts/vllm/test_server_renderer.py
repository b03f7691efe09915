"""`ServerRenderer` on conversations and single images, and with servers that cannot render."""

import io
import json

import numpy as np
import pytest
from engine_server import EngineVLLM
from PIL import Image
from rendering_server import (
    RenderingServer,
    file_of,
    image,
    letters,
    picture,
    text,
    user,
)

from renderers import MediaPolicy, load_renderer
from renderers.errors import MediaError, MediaPolicyError, MessageError
from rollouts.engines.http.responses import HttpResponse
from rollouts.engines.vllm import ServerRenderer
from rollouts.errors import (
    CapabilityError,
    MalformedResultError,
    ServerError,
)


@pytest.fixture
def server():
    return RenderingServer()


@pytest.fixture
def renderer(server):
    return ServerRenderer(server)


# Conversations.


async def test_an_image_is_rendered_once_over_many_turns(renderer, server):
    shown = image(file_of(picture(4)))
    messages = user(shown)
    for _ in range(4):
        await renderer.render(messages)
        messages = [*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    assert server.images_rendered().total() == 1
    assert len(server.files) == 2  # one is the probe


async def test_where_the_server_finds_nothing_by_name_the_files_are_sent():
    server = RenderingServer(cache="off")
    renderer = ServerRenderer(server)
    rendered = await renderer.render(user(image(picture(6))))
    again = await renderer.render(user(image(picture(6)), text("more")))
    assert len(rendered.multi_modal_data) == len(again.multi_modal_data) == 1
    assert server.images_rendered().total() == 1


async def test_a_server_that_answers_none_for_known_names_is_asked_under_another_name():
    server = RenderingServer(cache="sender")
    await ServerRenderer(server).render(user(image(picture(7))))
    other_process = ServerRenderer(server)
    rendered = await other_process.render(user(image(picture(7))))
    ((item, _),) = rendered.multi_modal_data.items_with_ranges()
    np.testing.assert_array_equal(item["pixel_values"], picture(7).reshape(-1, 3))
    assert len(server.images_rendered()) == 2


async def test_a_server_that_never_hands_out_tensors_is_an_error_with_the_cure():
    server = RenderingServer()
    renderer = ServerRenderer(server)
    await renderer.render(user(text("known by now")))
    server.cache = "silent"
    with pytest.raises(CapabilityError, match="mm-processor-cache-gb 0"):
        await renderer.render(user(image(picture(8))))


async def test_ranges_are_matched_by_order_where_the_server_names_images_itself(renderer, server):
    server.names_ignored = True
    rendered = await renderer.render(user(image(picture(11)), image(picture(12, 16, 16))))
    assert [item.num_tokens for item, _ in rendered.multi_modal_data.items_with_ranges()] == [6, 1]


async def test_a_conversation_that_gives_an_image_another_length_is_an_error(renderer, server):
    server.extra_length = 1
    with pytest.raises(MalformedResultError, match="6 tokens alone and 7 in the conversation"):
        await renderer.render(user(image(picture(13))))


@pytest.mark.parametrize("shift", [-1, 1, 400])
async def test_a_range_beside_the_placeholders_is_an_error(renderer, server, shift):
    await renderer.render(user(image(picture(14))))
    server.shift = shift
    with pytest.raises(MalformedResultError):
        await renderer.render(user(image(picture(14)), text("again")))


async def test_tools_and_template_options_reach_the_server(renderer, server):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    messages = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": {"at": "é"}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [text("seen"), image(picture(15))]},
    ]
    rendered = await renderer.render(messages, tools=tools, chat_template_kwargs={"enable_thinking": False})
    sent = server.rendered[-1]
    assert sent["tools"] == tools
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    call = sent["messages"][1]["tool_calls"][0]
    assert call == {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}
    assert sent["messages"][1]["reasoning"] == "hm"
    assert rendered.message_tool_names == [None, None, "look"]


# Content that is refused or converted.


def said(role):
    return [{"role": role, "content": "see <|image_pad|> here"}]


def image_at(reference):
    return user({"type": "image_url", "image_url": reference})


@pytest.mark.parametrize(
    ("messages", "error", "words"),
    [
        (image_at("/etc/secret.png"), MediaPolicyError, None),
        (image_at("file:///etc/secret.png"), MediaPolicyError, None),
        (image_at("http://169.254.169.254/latest"), MediaPolicyError, None),
        (image_at({"url": "https://example.org/a.png"}), MediaPolicyError, None),
        (user({"type": "audio_url", "audio_url": {"url": "http://x/y"}}), MediaPolicyError, "URL is not followed"),
        (user({"type": "input_image", "image_url": "http://x/y"}), MessageError, "a part of type 'input_image': "),
        (user({"type": "video", "video": b"x"}), MessageError, "video"),
        (user(image(file_of(picture(18))[:-100])), MediaError, None),
        *((said(role), MessageError, "image_pad") for role in ("user", "system", "tool")),
    ],
)
async def test_what_is_refused_with_its_place_before_it_is_sent(renderer, server, messages, error, words):
    before = [{"role": "assistant", "content": "sampled: <|image_pad|>"}]  # its own text may hold what it sampled
    with pytest.raises(error, match=words) as caught:
        await renderer.render([*before, *messages])
    assert caught.value.message_index == 1
    assert not server.images_rendered()


async def test_a_path_that_the_policy_allows_is_read_here(server, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(file_of(picture(17)))
    renderer = ServerRenderer(server, policy=MediaPolicy(allowed_directories=(tmp_path,)))
    rendered = await renderer.render(user(image(path)))
    ((item, _),) = rendered.multi_modal_data.items_with_ranges()
    np.testing.assert_array_equal(item["pixel_values"], picture(17).reshape(-1, 3))
    assert item.source.data == path.read_bytes()


@pytest.mark.parametrize("kind", ["transparent", "turned", "paletted", "sixteen bit"])
async def test_images_that_decoders_disagree_about_are_sent_as_png(renderer, server, kind):
    pixels = picture(19)
    file = io.BytesIO()
    if kind == "transparent":
        Image.fromarray(np.dstack([pixels, np.full(pixels.shape[:2], 128, np.uint8)])).save(file, "PNG")
    elif kind == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(pixels).save(file, "PNG", exif=exif)
    elif kind == "paletted":
        Image.fromarray(pixels).quantize(16).save(file, "PNG")
    else:
        Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(file, "PNG")
    await renderer.render(user(image(file.getvalue())))
    sent = Image.open(io.BytesIO(server.files[-1]))
    assert sent.mode == "RGB"
    assert sent.getexif().get(0x0112, 1) == 1
    if kind == "turned":
        np.testing.assert_array_equal(np.asarray(sent), np.rot90(pixels, -1))
    if kind == "sixteen bit":
        np.testing.assert_array_equal(np.asarray(sent), np.repeat(pixels[..., :1], 3, axis=2))


@pytest.mark.parametrize("content", ["  Count: 1 22\n\n", "naïve — 東京 🙂", "{'a': [1,\t2]}"])
async def test_the_server_renders_what_the_renderer_of_its_directory_renders(tiny_model_dir, content):
    messages = user(text(content), image(picture(0, 64, 48)), text("?"))
    own = load_renderer(tiny_model_dir).render(messages, add_generation_prompt=True)
    async with EngineVLLM(tiny_model_dir) as running, ServerRenderer.connect(running.base_url) as served:
        for _ in range(2):  # the second time, the image is named only
            rendered = await served.render(messages, add_generation_prompt=True)
            assert rendered.token_ids == own.token_ids
            ((item, place),) = rendered.multi_modal_data.items_with_ranges()
            ((own_item, own_place),) = own.multi_modal_data.items_with_ranges()
            assert (place.offset, place.length) == (own_place.offset, own_place.length)
            np.testing.assert_array_equal(item["pixel_values"], own_item["pixel_values"])
            assert item.mm_hash.startswith(item.source.digest)
            item.source.verify()
            assert rendered.placeholder_token_ids == {"image": own.placeholder_token_ids["image"]}
            assert rendered.logical_ids == own.logical_ids


async def item_of(renderer, pixels):
    """What one image becomes."""
    rendered = await renderer.render(user(image(pixels)))
    ((item, _),) = rendered.multi_modal_data.items_with_ranges()
    return item


async def test_servers_of_other_version_or_processing_give_other_hashes():
    servers = (RenderingServer(), RenderingServer(version="0.33.0"), RenderingServer(dtype="bfloat16"))
    hashes = {(await item_of(ServerRenderer(server), picture(26))).mm_hash for server in servers}
    assert len(hashes) == 3
    # A server process writes the names of an item's tensors in an order of its own; that is no other server.
    reordered = RenderingServer(names=("pixel_values", "image_grid_thw"))
    assert (await item_of(ServerRenderer(reordered), picture(26))).mm_hash in hashes


# Servers that cannot render.


@pytest.mark.parametrize("status", [403, 404, 405, 501])
async def test_a_server_that_does_not_render_is_an_error_with_the_cure(server, renderer, status):
    server.status = status
    with pytest.raises(CapabilityError, match="vllm launch render"):
        await renderer.render(user(text("a")))


async def test_a_model_that_only_reads_text_renders_text_and_refuses_images():
    renderer = ServerRenderer(RenderingServer(takes_images=False))
    rendered = await renderer.render(user(text("ok")))
    assert rendered.token_ids == letters("user\nok")
    assert rendered.multi_modal_data is None
    assert rendered.placeholder_token_ids == {}
    with pytest.raises(ServerError, match="no images"):
        await renderer.render(user(image(picture(29))))


def features(names, *ranges, **more):
    """The body of an answer of three tokens."""
    places = [{"offset": offset, "length": length} for offset, length in ranges]
    described = {"mm_hashes": {"image": names}, "mm_placeholders": {"image": places}, **more}
    return json.dumps({"token_ids": [1, 1, 1], "features": described}).encode()


@pytest.mark.parametrize(
    "answer",
    [
        b"not json",
        b'{"token_ids": []}',
        b'{"token_ids": [-1]}',
        b'{"token_ids": [1], "features": 3}',
        features(["a"]),
        features(["a"], (3, 1)),
        features(["a"], (-1, 1)),
        features(["a", "b"], (0, 2), (1, 1)),
        features([1], (0, 1)),
        features(["a"], (0, 1), kwargs_data={"image": [7]}),
    ],
)
async def test_an_answer_of_another_shape_is_an_error(server, renderer, answer):
    await renderer.render(user(text("a")))
    server._render = lambda sent: HttpResponse(200, {}, answer)
    with pytest.raises(MalformedResultError):
        await renderer.render(user(text("b")))
