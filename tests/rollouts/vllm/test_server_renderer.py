"""Rendering by a server, against one that is scripted: what it is sent, how often, and what it may answer."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from renderers import MediaPolicy, MediaStore
from renderers.errors import (
    ControlTokenInContentError,
    MediaDecodeError,
    MediaPolicyError,
    MessageError,
    UnknownPartError,
    UnsupportedModalityError,
)
from renderers.media.pixel_scale import PixelScale
from rollouts.engines.protocol import Completion, FinishReason
from rollouts.engines.vllm.http.response import HttpResponse
from rollouts.engines.vllm.rendering.blocking_renderer import BlockingServerRenderer
from rollouts.engines.vllm.rendering.prompt_chunks import ImageChunk, ImagePointer, TokenChunk
from rollouts.engines.vllm.rendering.server_renderer import ServerRenderer
from rollouts.errors import (
    CapabilityError,
    EngineClosedError,
    InvalidRequestError,
    MalformedResultError,
    ServerError,
    ServerUnreachableError,
)
from rollouts.training.samples import samples_from_trajectory
from rollouts.trajectory.pixel_forms import pack_episodes
from rollouts.trajectory.tree import Trajectory
from transport import decode, encode

START, END, PAD = 500, 501, 502
SPECIAL = {"<|vision_start|>": START, "<|vision_end|>": END, "<|image_pad|>": PAD}
SPELLED = {number: text for text, number in SPECIAL.items()}


def picture(seed: int = 0, height: int = 32, width: int = 48) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def file_of(pixels: np.ndarray, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def user(*parts):
    return [{"role": "user", "content": [*parts]}]


def image(value):
    return {"type": "image", "image": value}


def text(value):
    return {"type": "text", "text": value}


class RenderingServer:
    """Answers as vLLM does: a token a character, 16x16 pixels an image token, tensors as in the wire notes.

    `cache`: "processor", which holds tensors and hands them out; "sender", which holds names alone and answers None for
    a name it knows; "silent", which never hands out tensors; "off", which finds nothing by name.
    """

    base_url = "http://rendering.test"

    def __init__(
        self,
        cache="processor",
        version="0.32.0",
        dtype="uint8",
        takes_images=True,
        delay=0.0,
        names=("image_grid_thw", "pixel_values"),
    ):
        self.cache, self.version, self.dtype, self.takes_images = cache, version, dtype, takes_images
        self.names = names
        self.delay = delay
        self.held: dict[str, Image.Image] = {}
        self.rendered: list[dict] = []
        self.files: list[bytes] = []
        self.status = 200
        self.shift = 0
        self.names_ignored = False
        self.extra_length = 0
        self.before_answer = None

    async def request(self, method, path, *, name, body=None, params=None, headers=None, **_):
        if path == "/version":
            return self._reply({"version": self.version})
        if path == "/v1/models":
            return self._reply({"data": [{"id": "tiny", "root": "/models/tiny", "max_model_len": 4096}]})
        sent = json.loads(b"".join(bytes(segment) for segment in body))
        if path == "/detokenize":
            return self._reply({"prompt": "".join(SPELLED.get(one, chr(one)) for one in sent["tokens"])})
        assert path == "/v1/chat/completions/render"
        await asyncio.sleep(self.delay)
        if self.before_answer is not None:
            self.before_answer(sent)
        if self.status != 200:
            return refusal("no", self.status)
        return self._render(sent)

    async def close(self):
        pass

    def images_rendered(self) -> Counter:
        """Names of images whose tensors were asked for, probes of ours aside."""
        asked: Counter = Counter()
        for sent in self.rendered:
            if sent.get("mm_payload") != "none":
                asked.update(name for name in _names(sent) if not name.startswith("render-probe"))
        return asked

    def _reply(self, answer, status=200):
        return HttpResponse(status, {}, json.dumps(answer).encode())

    def _render(self, sent):
        ids, names, ranges, data = [], [], [], []
        for message in sent["messages"]:
            ids += [ord(letter) for letter in message["role"]] + [10]
            content = message.get("content", "")
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                if part["type"] == "text":
                    ids += [ord(letter) for letter in part["text"]]
                    continue
                if not self.takes_images:
                    return refusal("no images", 400)
                shown = self._shown(part)
                if shown is None:
                    return refusal("Cache miss", 400)
                pixels, known = shown
                count = tokens_of(pixels) + self.extra_length * (sent.get("mm_payload") == "none")
                ids.append(START)
                ranges.append({"offset": len(ids) + self.shift, "length": count})
                ids += [PAD] * count + [END]
                names.append("server's own" if self.names_ignored else part["uuid"])
                hidden = self.cache == "silent" or (known and self.cache == "sender")
                data.append(None if hidden else kwargs_of(pixels, self.dtype, self.names))
        if sent.get("add_generation_prompt"):
            ids += [ord(letter) for letter in "assistant:"]
        self.rendered.append(sent)
        features = None
        if names:
            sends = None if sent.get("mm_payload") == "none" else {"image": data}
            features = {"mm_hashes": {"image": names}, "mm_placeholders": {"image": ranges}, "kwargs_data": sends}
        return self._reply({"request_id": "chatcmpl-1", "token_ids": ids, "features": features})

    def _shown(self, part):
        name, url = part["uuid"], part["image_url"]
        known = name in self.held
        if url is None:
            return (self.held[name], True) if known else None
        kind, _, payload = url["url"].partition(";base64,")
        assert kind in ("data:image/png", "data:image/jpeg"), "the server would have to fetch or guess"
        self.files.append(base64.b64decode(payload))
        pixels = Image.open(io.BytesIO(self.files[-1]))
        if self.cache != "off":
            pixels = self.held.setdefault(name, pixels)  # as vLLM: what a name meant first, it means
        return pixels, known


def refusal(message, status):
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return HttpResponse(status, {}, json.dumps({"error": error}).encode())


def _names(sent):
    return [
        part["uuid"]
        for message in sent["messages"]
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]


def tokens_of(pixels: Image.Image) -> int:
    return -(-pixels.height // 16) * -(-pixels.width // 16)


def tensor(array, dtype):
    return [dtype, list(array.shape), msgpack.ExtType(3, array.tobytes())]


def kwargs_of(pixels: Image.Image, dtype: str, names) -> str:
    values = np.asarray(pixels.convert("RGB")).reshape(-1, 3)
    if dtype == "bfloat16":  # of the powers of two, whose bits need no rounding
        values = np.array([0x3F80, 0x4000, 0xC080], dtype=np.uint16).reshape(1, 3)
    rows = len(values)
    item = {
        "image_grid_thw": {
            "data": tensor(np.array([1, pixels.height, pixels.width]), "int64"),
            "field": ["batched", {"keep_on_cpu": True}],
        },
        "pixel_values": {
            "data": tensor(values, dtype),
            "field": ["flat", {"keep_on_cpu": False, "slices": [[[0, rows, None]]], "dim": 0}],
        },
    }
    return base64.b64encode(msgpack.packb({name: item[name] for name in names})).decode()


@pytest.fixture
def server():
    return RenderingServer()


@pytest.fixture
def renderer(server):
    return ServerRenderer(server)


def letters(word: str) -> list[int]:
    return [ord(letter) for letter in word]


# Conversations.


async def test_a_text_conversation_comes_back_as_the_servers_tokens(renderer):
    rendered = await renderer.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert rendered.token_ids == letters("user\nhiassistant:")
    assert rendered.multi_modal_data.is_empty()


async def test_attribution_is_one_span_without_an_owner_because_nobody_told(renderer):
    rendered = await renderer.render([{"role": "user", "content": "hi"}])
    assert [tuple(span) for span in rendered.spans] == [(0, len(rendered.token_ids), -1, False, False)]
    assert rendered.message_roles == ["user"]
    assert not any(rendered.sampled_mask)
    assert rendered.tokens_per_message() == [0]


async def test_images_come_with_their_ranges_tensors_sources_and_a_hash_of_ours(renderer):
    first, second = picture(1), picture(2, 16, 64)
    rendered = await renderer.render(user(text("a"), image(first), image(second)))
    placed = rendered.multi_modal_data.items_with_ranges()
    assert [(where.offset, where.length) for _, where in placed] == [(7, 6), (15, 4)]
    for item, where in placed:
        assert rendered.token_ids[where.offset : where.end] == [PAD] * where.length
        assert item.mm_hash.startswith(item.source.digest)
        item.source.verify()
    np.testing.assert_array_equal(placed[0][0]["pixel_values"], first.reshape(-1, 3))
    np.testing.assert_array_equal(placed[1][0]["pixel_values"], second.reshape(-1, 3))
    assert rendered.placeholder_token_ids == {"image": PAD}
    assert rendered.logical_ids == [*letters("user\na"), START, PAD, END, START, PAD, END]


async def test_the_same_image_twice_in_a_message_is_two_ranges_of_one_item(renderer, server):
    same = file_of(picture(3))
    rendered = await renderer.render(user(image(same), image(bytes(bytearray(same)))))
    (one, _), (other, _) = rendered.multi_modal_data.items_with_ranges()
    assert one is other
    assert server.images_rendered().total() == 1


async def test_an_image_is_rendered_once_over_many_turns(renderer, server):
    shown = image(file_of(picture(4)))
    messages = user(shown)
    for _ in range(4):
        await renderer.render(messages)
        messages = [*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    assert server.images_rendered().total() == 1
    assert len(server.files) == 2  # one is the probe


async def test_concurrent_first_uses_share_one_request(server):
    server.delay = 0.02
    renderer = ServerRenderer(server)
    data = file_of(picture(5))
    await asyncio.gather(*(renderer.render(user(image(bytes(bytearray(data))), text(str(n)))) for n in range(12)))
    assert server.images_rendered().total() == 1


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


async def test_names_are_of_our_digest_so_that_one_never_stands_for_two_images(renderer, server):
    rendered = await renderer.render(user(image(picture(9)), image(picture(10))))
    digests = {item.source.digest for item, _ in rendered.multi_modal_data.items_with_ranges()}
    assert len(digests) == 2
    assert set(server.images_rendered()) == {f"render-{digest}" for digest in digests}


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


async def test_what_the_template_is_told_reaches_the_server(renderer, server):
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


# What may be shown.


async def test_a_reference_that_the_policy_does_not_allow_is_never_sent(renderer, server, tmp_path):
    path = tmp_path / "secret.png"
    path.write_bytes(file_of(picture(16)))
    for reference in (str(path), path.as_uri(), "http://169.254.169.254/latest", {"url": "https://example.org/a.png"}):
        with pytest.raises(MediaPolicyError) as caught:
            await renderer.render(user(text("look"), {"type": "image_url", "image_url": reference}))
        assert (caught.value.message_index, caught.value.part_index) == (0, 1)
    assert not server.images_rendered()


async def test_a_path_that_the_policy_allows_is_read_here(server, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(file_of(picture(17)))
    renderer = ServerRenderer(server, policy=MediaPolicy(allowed_directories=(tmp_path,)))
    rendered = await renderer.render_chunks([ImagePointer(path)])
    ((item, _),) = rendered.multi_modal_data.items_with_ranges()
    np.testing.assert_array_equal(item["pixel_values"], picture(17).reshape(-1, 3))
    assert item.source.data == path.read_bytes()


async def test_parts_that_a_server_would_fetch_by_itself_are_refused(renderer):
    for part in (
        {"type": "audio_url", "audio_url": {"url": "http://x/y"}},
        {"type": "input_image", "image_url": "http://x/y"},
    ):
        with pytest.raises(UnknownPartError):
            await renderer.render(user(part))


async def test_a_video_is_refused_with_its_place(renderer):
    with pytest.raises(UnsupportedModalityError) as caught:
        await renderer.render(user(text("a"), {"type": "video", "video": b"x"}))
    assert caught.value.part_index == 1


async def test_a_broken_image_is_our_error_and_not_the_servers(renderer, server):
    with pytest.raises(MediaDecodeError):
        await renderer.render(user(image(file_of(picture(18))[:-100])))
    assert not server.images_rendered()


@pytest.mark.parametrize("kind", ["transparent", "turned", "paletted", "sixteen bit"])
async def test_images_that_decoders_disagree_about_are_sent_as_we_see_them(renderer, server, kind):
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
    await renderer.render_chunks([ImageChunk(file.getvalue())])
    sent = Image.open(io.BytesIO(server.files[-1]))
    assert sent.mode == "RGB"
    assert sent.getexif().get(0x0112, 1) == 1
    if kind == "turned":
        np.testing.assert_array_equal(np.asarray(sent), np.rot90(pixels, -1))
    if kind == "sixteen bit":
        np.testing.assert_array_equal(np.asarray(sent), np.repeat(pixels[..., :1], 3, axis=2))


async def test_a_plain_file_is_sent_byte_for_byte(renderer, server):
    data = file_of(picture(20), "JPEG", quality=80)
    await renderer.render_chunks([ImageChunk(data)])
    assert server.files[-1] == data


@pytest.mark.parametrize("role", ["user", "system", "tool"])
async def test_text_that_spells_a_token_of_the_template_is_refused(renderer, server, role):
    messages = [{"role": "user", "content": "a"}, {"role": role, "content": "see <|image_pad|> here"}]
    with pytest.raises(ControlTokenInContentError, match="image_pad") as caught:
        await renderer.render(messages)
    assert caught.value.message_index == 1


async def test_an_assistants_own_text_may_hold_what_it_sampled(renderer):
    await renderer.render([{"role": "assistant", "content": "<|image_pad|>"}])


# Chunks.


async def test_token_chunks_are_never_tokenised_again(renderer, server):
    ids = [PAD, START, 7, 7, PAD]  # a policy may sample a literal placeholder
    last = TokenChunk(np.array([9], np.int32))
    rendered = await renderer.render_chunks([TokenChunk(ids), ImageChunk(picture(21)), last])
    assert rendered.token_ids == [*ids, *[PAD] * 6, 9]
    assert all(type(one) is int for one in rendered.token_ids)
    ((_, where),) = rendered.multi_modal_data.items_with_ranges()
    assert (where.offset, where.length) == (5, 6)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.one_of(
            st.lists(st.integers(0, 600), max_size=6),
            st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(1, 40)),
        ),
        max_size=7,
    )
)
def test_chunks_are_put_one_behind_the_other_whatever_they_are(plan):
    chunks, expected, ranges = [], [], []
    for piece in plan:
        if isinstance(piece, list):
            chunks.append(TokenChunk(piece))
            expected += piece
        else:
            pixels = picture(*piece)
            chunks.append(ImageChunk(pixels))
            count = -(-piece[1] // 16) * -(-piece[2] // 16)
            ranges.append((len(expected), count))
            expected += [PAD] * count
    rendered = asyncio.run(ServerRenderer(RenderingServer()).render_chunks(chunks))
    assert rendered.token_ids == expected
    assert [(where.offset, where.length) for _, where in rendered.multi_modal_data.items_with_ranges()] == ranges


async def test_every_form_of_an_image_is_taken(renderer):
    pixels = picture(22)
    data = file_of(pixels)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for value in (data, pixels, Image.fromarray(pixels), url):
        rendered = await renderer.render_chunks([ImageChunk(value, expected_tokens=6)])
        ((item, _),) = rendered.multi_modal_data.items_with_ranges()
        np.testing.assert_array_equal(item["pixel_values"], pixels.reshape(-1, 3))


async def test_another_count_than_expected_is_an_error_with_both_numbers(renderer):
    with pytest.raises(InvalidRequestError, match=r"chunk 1 at .*: the image takes 6 tokens .* expected 9"):
        await renderer.render_chunks([TokenChunk([1]), ImageChunk(picture(23), expected_tokens=9)])


async def test_a_chunk_of_another_kind_is_an_error(renderer):
    for chunk in (ImageChunk("/etc/passwd"), ImageChunk("http://x/y"), "text"):
        with pytest.raises(MessageError):
            await renderer.render_chunks([chunk])
    for ids in ([-1], [[1]], [1.5]):
        with pytest.raises(InvalidRequestError):
            await renderer.render_chunks([TokenChunk(ids)])


# Items.


async def test_bfloat16_tensors_read_as_the_floats_of_equal_value():
    renderer = ServerRenderer(RenderingServer(dtype="bfloat16"))
    ((item, _),) = (await renderer.render_chunks([ImageChunk(picture(24))])).multi_modal_data.items_with_ranges()
    np.testing.assert_array_equal(item["pixel_values"], np.array([[1.0, 2.0, -4.0]], np.float32))
    assert item["pixel_values"].dtype == np.float32
    assert item.scale is None


async def test_a_scale_goes_into_items_of_uint8_pixels(server):
    scale = PixelScale()
    ((item, _),) = (
        await ServerRenderer(server, scale=scale).render_chunks([ImageChunk(picture(25))])
    ).multi_modal_data.items_with_ranges()
    assert item.scale is scale
    floats = RenderingServer(dtype="bfloat16")
    ((item, _),) = (
        await ServerRenderer(floats, scale=scale).render_chunks([ImageChunk(picture(25))])
    ).multi_modal_data.items_with_ranges()
    assert item.scale is None


async def test_servers_of_other_version_or_processing_give_other_hashes():
    hashes = set()
    for server in (RenderingServer(), RenderingServer(version="0.33.0"), RenderingServer(dtype="bfloat16")):
        rendered = await ServerRenderer(server).render_chunks([ImageChunk(picture(26))])
        hashes.update(rendered.multi_modal_data.mm_hashes["image"])
    # A server process writes the names of an item's tensors in an order of its own; that is no other server.
    reordered = ServerRenderer(RenderingServer(names=("pixel_values", "image_grid_thw")))
    same = await reordered.render_chunks([ImageChunk(picture(26))])
    assert len(hashes) == 3
    assert same.multi_modal_data.mm_hashes["image"][0] in hashes


async def test_the_cache_is_bounded_in_bytes(server):
    store = MediaStore(max_bytes=40_000)  # an image is about 14 kB with its source
    renderer = ServerRenderer(server, store=store)
    for seed in range(8):
        await renderer.render_chunks([ImageChunk(picture(seed))])
        assert store.nbytes <= 40_000
    assert server.images_rendered().total() == 8
    await renderer.render_chunks([ImageChunk(picture(7))])
    assert server.images_rendered().total() == 8
    await renderer.render_chunks([ImageChunk(picture(0))])
    assert server.images_rendered().total() == 9


async def test_a_server_that_restarted_with_other_settings_while_it_rendered_is_asked_again(server):
    renderer = ServerRenderer(server)

    def restart(sent):
        if any(not name.startswith("render-probe") for name in _names(sent)) and server.dtype == "uint8":
            server.dtype = "bfloat16"
            server.held.clear()
            renderer.forget()

    server.before_answer = restart
    rendered = await renderer.render_chunks([ImageChunk(picture(27))])
    ((item, _),) = rendered.multi_modal_data.items_with_ranges()
    assert item["pixel_values"].dtype == np.float32
    fresh = await ServerRenderer(RenderingServer(dtype="bfloat16")).render_chunks([ImageChunk(picture(27))])
    assert item.mm_hash == fresh.multi_modal_data.mm_hashes["image"][0]


async def test_a_server_that_restarts_without_end_is_an_error(server):
    renderer = ServerRenderer(server)
    server.before_answer = lambda sent: renderer.forget() if not _names(sent)[0].startswith("render-probe") else None
    with pytest.raises(ServerUnreachableError, match="restarted 4 times"):
        await renderer.render_chunks([ImageChunk(picture(28))])


# Servers that cannot.


@pytest.mark.parametrize("status", [403, 404, 405, 501])
async def test_a_server_that_does_not_render_is_an_error_with_the_cure(server, renderer, status):
    server.status = status
    with pytest.raises(CapabilityError, match="vllm launch render"):
        await renderer.render(user(text("a")))


async def test_an_error_of_the_server_comes_back_as_one(server, renderer):
    server.status = 500
    with pytest.raises(ServerError) as caught:
        await renderer.render(user(text("a")))
    assert caught.value.status == 500


async def test_a_model_that_only_reads_text_renders_text_and_refuses_images():
    renderer = ServerRenderer(RenderingServer(takes_images=False))
    rendered = await renderer.render(user(text("ok")))
    assert rendered.token_ids == letters("user\nok")
    assert rendered.multi_modal_data is None
    assert rendered.placeholder_token_ids == {}
    with pytest.raises(ServerError, match="no images"):
        await renderer.render(user(image(picture(29))))


async def test_an_unknown_model_is_an_error_that_names_those_served(server):
    with pytest.raises(CapabilityError, match="serves tiny, not other"):
        await ServerRenderer(server, model="other").render(user(text("a")))


def features(names, *ranges, **more):
    """The body of an answer of three tokens."""
    places = [{"offset": offset, "length": length} for offset, length in ranges]
    described = {"mm_hashes": {"image": names}, "mm_placeholders": {"image": places}, **more}
    return json.dumps({"token_ids": [1, 1, 1], "features": described}).encode()


@pytest.mark.parametrize(
    "answer",
    [
        b"not json",
        b"[]",
        b'{"token_ids": []}',
        b'{"token_ids": [-1]}',
        b'{"token_ids": [true]}',
        b'{"token_ids": [1], "features": 3}',
        features(["a"], mm_placeholders={}),
        features(["a"]),
        features(["a"], (3, 1)),
        features(["a"], (2, 2)),
        features(["a"], (0, 0)),
        features(["a"], (-1, 1)),
        features(["a", "b"], (0, 2), (1, 1)),
        features([1], (0, 1)),
        features(["a"], (0, 1), kwargs_data={"image": [7]}),
        features(["a"], (0, 1), kwargs_data={"image": []}),
    ],
)
async def test_an_answer_of_another_shape_is_an_error(server, renderer, answer):
    await renderer.render(user(text("a")))
    server._render = lambda sent: HttpResponse(200, {}, answer)
    with pytest.raises(MalformedResultError):
        await renderer.render(user(text("b")))


# Trajectories.


def test_a_trajectory_keeps_the_sources_and_makes_the_same_items_of_them_again(server):
    with BlockingServerRenderer(ServerRenderer(server)) as blocking:
        messages = user(image(picture(40)), text("which?"))
        prompt = blocking.render(messages)
        episode = Trajectory("episode")
        drawn = Completion(0, np.array([7], np.int32), np.array([-1.0], np.float32), FinishReason.STOP)
        episode.add_turn(prompt, drawn, {"role": "assistant", "content": "that"}, messages=messages)
        received = decode(encode(episode))
        (sample,) = samples_from_trajectory(received, advantage=1.0, processors=blocking.processors)
        ((item, where),) = sample.media
        ((shown, shown_where),) = prompt.multi_modal_data.items_with_ranges()
        assert (item.mm_hash, where) == (shown.mm_hash, shown_where)
        np.testing.assert_array_equal(item["pixel_values"], shown["pixel_values"])
        packed = pack_episodes([episode], pixels="uint8", processors=blocking.processors)
    (sample,) = samples_from_trajectory(packed.episodes[0], advantage=1.0, processors=packed.processors())
    np.testing.assert_array_equal(sample.media[0][0]["pixel_values"], shown["pixel_values"])


async def test_a_processor_has_what_rendering_asks_of_one(server):
    blocking = BlockingServerRenderer(ServerRenderer(server))
    (processor,) = (await asyncio.to_thread(lambda: blocking.processors)).values()
    assert processor.marker == "<|image_pad|>"
    rendered = await asyncio.to_thread(blocking.render_chunks, [ImageChunk(picture(41))])
    ((item, _),) = rendered.multi_modal_data.items_with_ranges()
    assert await asyncio.to_thread(processor.mm_hash, item.source) == item.mm_hash
    blind = BlockingServerRenderer(ServerRenderer(RenderingServer(takes_images=False)))
    assert await asyncio.to_thread(lambda: blind.processors) == {}
    for one in (blocking, blind):
        one.close()


# Several loops and threads.


async def test_a_cancelled_caller_leaves_the_image_to_the_others(server):
    server.delay = 0.05
    renderer = ServerRenderer(server)
    await renderer.render(user(text("known by now")))
    first = asyncio.create_task(renderer.render_chunks([ImageChunk(picture(30))]))
    second = asyncio.create_task(renderer.render_chunks([ImageChunk(picture(30))]))
    await asyncio.sleep(0.03)
    first.cancel()
    rendered = await second
    assert len(rendered.multi_modal_data) == 1
    assert server.images_rendered().total() == 1


def test_a_loop_that_ends_in_mid_request_leaves_the_image_to_other_loops(server):
    server.delay = 0.2
    renderer = ServerRenderer(server)
    chunk = [ImageChunk(picture(31))]
    asyncio.run(renderer.render(user(text("known by now"))))

    async def given_up():
        await asyncio.wait_for(renderer.render_chunks(chunk), timeout=0.1)

    def other_loop():
        return asyncio.run(renderer.render_chunks(chunk))

    with ThreadPoolExecutor(1) as pool:
        try:
            waiting = None

            async def both():
                nonlocal waiting
                task = asyncio.create_task(given_up())
                await asyncio.sleep(0.05)
                waiting = pool.submit(other_loop)
                await asyncio.wait([task])
                assert task.exception() is not None

            asyncio.run(both())
        finally:
            rendered = waiting.result(timeout=20)
    assert len(rendered.multi_modal_data) == 1


def test_the_blocking_form_serves_many_threads_at_once_on_one_loop(server):
    server.delay = 0.1
    blocking = BlockingServerRenderer(ServerRenderer(server))
    threads_before = threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        rendered = list(pool.map(lambda n: blocking.render(user(text(str(n)))).token_ids, range(8)))
    assert rendered == [letters(f"user\n{n}") for n in range(8)]
    blocking.close()
    blocking.close()
    assert threading.active_count() <= threads_before
    with pytest.raises(EngineClosedError):
        blocking.render(user(text("a")))


async def test_the_blocking_form_refuses_to_stop_an_event_loop_but_works_beside_one(server):
    with BlockingServerRenderer(ServerRenderer(server)) as blocking:
        with pytest.raises(InvalidRequestError, match="running event loop"):
            blocking.render(user(text("a")))
        rendered = await asyncio.to_thread(blocking.render_chunks, [TokenChunk([1]), ImageChunk(picture(32))])
    assert len(rendered) == 7


def test_closing_the_blocking_form_ends_the_calls_that_wait(server):
    server.delay = 30
    blocking = BlockingServerRenderer(ServerRenderer(server))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(blocking.render, user(text("a")))
        while blocking._loop is None:
            pass
        threading.Event().wait(0.1)
        blocking.close()
        with pytest.raises(EngineClosedError):
            waiting.result(timeout=10)
