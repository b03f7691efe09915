"""Media of conversations: loaded once, processed once, side by side, and never on an event loop."""

import hashlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import images
import numpy as np
import pytest
from hostile_server import Exchange, HostileServer, answer
from media_parts import data_url
from PIL import Image

import renderers.media.reference
import renderers.vision.qwen_vl
from renderers import (
    MediaPolicy,
    MediaSource,
    MediaStore,
    RenderedTokens,
    TemplateRenderer,
    load_renderer,
)
from renderers.errors import (
    MediaError,
    MediaLimitError,
    MediaPolicyError,
)
from renderers.media.item import MediaItem

Counter = Callable[[], int]


def png(seed: int, side: int = 48) -> bytes:
    return images.png(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def user(*media: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": value, **fields} for value in media]}]


def items(rendered: RenderedTokens) -> list[MediaItem]:
    assert rendered.multi_modal_data is not None
    return [item for item, _ in rendered.multi_modal_data.items_with_ranges()]


@pytest.fixture
def fresh(tiny_model_dir: Path) -> TemplateRenderer:
    return load_renderer(tiny_model_dir)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How many images were decoded so far."""
    return counting(monkeypatch, renderers.vision.qwen_vl, "decode_planes")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How many references were read, and so hashed, so far."""
    return counting(monkeypatch, renderers.media.reference, "source_of_part")


def counting(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Counter:
    original, calls = getattr(module, name), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        time.sleep(0.02)  # long enough for others to come meanwhile
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    return lambda: len(calls)


@pytest.mark.parametrize("form", [lambda data: data, data_url], ids=["bytes", "data URL"])
def test_an_image_seen_before_is_neither_read_nor_decoded_again(
    fresh: TemplateRenderer, decoded: Counter, read: Counter, form: Callable[[bytes], Any]
) -> None:
    value = form(png(1))
    first = fresh.render(user(value))
    for _ in range(3):
        assert items(fresh.render(user(value)))[0] is items(first)[0]
    assert (decoded(), read()) == (1, 1)


def test_many_threads_with_one_new_image_process_it_once(fresh: TemplateRenderer, decoded: Counter) -> None:
    data = png(4)
    barrier = threading.Barrier(8)

    def render(_: int) -> MediaItem:
        barrier.wait()
        return items(fresh.render(user(bytes(bytearray(data)))))[0]  # each brings an object of its own

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(render, range(8)))
    assert decoded() == 1
    assert all(item is found[0] for item in found)


def test_a_forked_process_makes_images_of_its_own(fresh: TemplateRenderer) -> None:
    fresh.render(user(png(24), png(25)))  # the threads of this process are not those of the next
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads, which is the point
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(len(fresh.render(user(png(26), png(27))).token_ids) == 0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_source_under_a_wrong_digest_is_refused(fresh: TemplateRenderer) -> None:
    forged = MediaSource(hashlib.sha256(png(28)).hexdigest(), png(29))
    with pytest.raises(MediaError):
        fresh.render(user(forged))
    assert items(fresh.render(user(png(28))))[0].source.data == png(28)


def one_after_the_other(*bodies: bytes) -> Callable[[Exchange], None]:
    """A handler whose answer changes from request to request."""
    left = [answer(body) for body in bodies]
    return lambda exchange: left.pop(0)(exchange)


def reaching(tiny_model_dir: Path) -> TemplateRenderer:
    policy = MediaPolicy(
        allowed_schemes=frozenset({"http"}), allowed_hosts=("127.0.0.1",), allowed_networks=("127.0.0.1/32",)
    )
    return load_renderer(tiny_model_dir, media_policy=policy)


def test_a_url_means_what_it_meant_when_it_was_first_fetched(tiny_model_dir: Path, server: HostileServer) -> None:
    renderer = reaching(tiny_model_dir)
    url = server.on("/c.png", one_after_the_other(png(12), png(13)))
    first = items(renderer.render(user(url)))[0]
    assert items(renderer.render(user(url)))[0] is first
    assert first.source.digest == hashlib.sha256(png(12)).hexdigest()


def test_what_one_policy_fetched_another_still_refuses(tiny_model_dir: Path, server: HostileServer) -> None:
    renderer = reaching(tiny_model_dir)
    url = server.on("/d.png", answer(png(14)))
    renderer.render(user(url))
    strict = load_renderer(tiny_model_dir, media_store=renderer.processors["image"].store)
    with pytest.raises(MediaPolicyError):
        strict.render(user(url))


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (b"", MediaError),
        (png(18)[:60], MediaError),
        (png(19, 300), MediaLimitError),
        (Image.new("RGB", (600, 2)), MediaLimitError),
        ("https://example.org/a.png", MediaPolicyError),
    ],
)
def test_bad_media_name_message_and_part(tiny_model_dir: Path, value: Any, error: type[MediaError]) -> None:
    renderer = load_renderer(tiny_model_dir, media_policy=MediaPolicy(max_pixels=80_000))
    messages = [{"role": "user", "content": "first"}, *user(png(20), value, b"GIF89a broken too")]
    with pytest.raises(error, match="message 1, part 1") as caught:
        renderer.render(messages)
    assert (caught.value.message_index, caught.value.part_index) == (1, 1)
    if isinstance(value, bytes) and value:
        assert caught.value.digest == hashlib.sha256(value).hexdigest()


def test_items_of_a_prefetch_stay_although_the_store_is_too_small(tiny_model_dir: Path) -> None:
    small = load_renderer(tiny_model_dir, media_store=MediaStore(1000))
    assert len(small.prefetch(user(*(png(seed) for seed in range(4)))).result(timeout=30)) == 4
    assert len(small.render(user(png(1))).token_ids) > 4
