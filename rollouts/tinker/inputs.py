"""Chunks of requests as token ids with placed images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from renderers import MediaItem, MediaPolicy, PlaceholderRange
from renderers.errors import MediaError, MediaLimitError, MessageError
from renderers.expansion import placed_tokens
from renderers.loading import load_media_reader
from renderers.media.item import ExpansionPiece
from renderers.media.sniffing import sniff
from renderers.placement import PlacedItem
from rollouts.serve.errors import RequestError
from rollouts.tinker.requests import Chunk, ImageChunk, ImagePointerChunk, ModelInput, TextChunk


class InputReader:
    """Reads chunks for the model of a directory, which needs a tokenizer, and no chat template. Safe for threads.

    Ids of text stay as they are. An image token among them is text: images are at the ranges of their chunks
    only. The chunk of an image stands for all that the model's processor puts in place of one image marker,
    or, if `expected_tokens` says so, for a part of that, beside which the client writes the rest as text:
    without text at its edges (the line breaks of Gemma 3), or from the first feature to the last (InternVL
    without `<img>`, `</img>`). For Qwen-VL and Kimi K2.5 these are the same: the features alone.

    Each distinct file is processed once while the store of media holds it. Images at URLs and paths are read
    as far as `media_policy` allows, which by default is not at all.
    """

    def __init__(self, directory: Path, *, media_policy: MediaPolicy | None = None) -> None:
        """Raises a `LoadError` for a directory whose tokenizer or image settings cannot be read."""
        self.tokenizer, self._media = load_media_reader(directory, media_policy=media_policy)

    def read(self, place: str, chunks: Sequence[Chunk]) -> ModelInput:
        """The input of chunks; errors name them `place[0]`, `place[1]`... May wait for images, so call it on a thread.

        Raises `RequestError` (400) for an image that cannot be read, is larger than the policy allows, has
        another format than its chunk says or becomes another number of tokens than it expects, and for any
        image where the model takes none.
        """
        return self.read_rows([(place, chunks)])[0]

    def read_rows(self, rows: Sequence[tuple[str, Sequence[Chunk]]]) -> list[ModelInput]:
        """The inputs of rows (place, chunks), new images processed together. Raises `RequestError`."""
        images = [
            _Image(f"{place}[{number}]", chunk)
            for place, chunks in rows
            for number, chunk in enumerate(chunks)
            if not isinstance(chunk, TextChunk)
        ]
        items = iter(self._items(images))
        return [self._placed(place, chunks, items) for place, chunks in rows]

    def _items(self, images: Sequence[_Image]) -> list[MediaItem]:
        for image in images:
            if isinstance(image.chunk, ImageChunk):
                _check_format(image, image.chunk.data)
        chunks = [image.chunk for image in images]
        parts = [
            {"type": "image", "image": chunk.data if isinstance(chunk, ImageChunk) else chunk.location}
            for chunk in chunks
        ]
        try:
            items = self._media.prefetch([{"role": "user", "content": parts}]).result()
        except (MediaError, MessageError) as error:
            where = images[error.part_index or 0].place
            cure = "send a smaller image" if isinstance(error, MediaLimitError) else "send the bytes of a PNG or JPEG"
            cure = "send text only" if isinstance(error, MessageError) else cure
            raise RequestError(400, f"{where}: {error.reason}; {cure}") from error
        for image, item in zip(images, items, strict=True):
            if isinstance(image.chunk, ImagePointerChunk):
                _check_format(image, item.source.data)
        return items

    def _placed(self, place: str, chunks: Sequence[Chunk], items: Iterator[MediaItem]) -> ModelInput:
        ids: list[np.ndarray] = []
        media: list[PlacedItem] = []
        length = 0
        for number, chunk in enumerate(chunks):
            if isinstance(chunk, TextChunk):
                tokens = chunk.token_ids
            else:
                item = next(items)
                tokens, placeholder = self._image_tokens(f"{place}[{number}]", item, chunk.expected_tokens, length)
                media.append((item, placeholder))
            ids.append(tokens)
            length += len(tokens)
        return ModelInput(np.concatenate([np.empty(0, np.int64), *ids], dtype=np.int64), media)

    def _image_tokens(
        self, place: str, item: MediaItem, expected: int | None, offset: int
    ) -> tuple[np.ndarray, PlaceholderRange]:
        """The tokens of an image, int64 (k,), and their range; all of its expansion unless fewer are expected."""
        pieces = item.pieces(self._media.processors["image"].marker)
        controls = [self.tokenizer.control_id(piece.text) is not None for piece in pieces]
        features = [bool(piece.embed) for piece in pieces]
        possible = []
        for part in (pieces, _between(pieces, controls), _between(pieces, features)):
            ids, placeholder = placed_tokens(part, offset, self.tokenizer)
            if expected is None or expected == len(ids):
                return np.array(ids, np.int64), replace(placeholder, whole=part == pieces)
            possible.append(len(ids))
        made = " or ".join(map(str, dict.fromkeys(possible)))
        raise RequestError(
            400,
            f"{place} expects {expected} tokens, and the model's processor makes {made} of the image; count them with "
            "the processor of the same model, or leave expected_tokens out",
        )


class _Image(NamedTuple):
    """The chunk of an image and its name in errors."""

    place: str
    chunk: ImageChunk | ImagePointerChunk


def _check_format(image: _Image, data: bytes | memoryview) -> None:
    found = sniff(data)
    if found != f"image/{image.chunk.format}":
        raise RequestError(
            400,
            f"{image.place} has the format {image.chunk.format[:40]!r}, and its bytes are "
            f"{found or 'of no known type'}; send a PNG or JPEG and name its format",
        )


def _between(pieces: Sequence[ExpansionPiece], wanted: Sequence[bool]) -> Sequence[ExpansionPiece]:
    """The pieces from the first to the last that is wanted."""
    return pieces[wanted.index(True) : len(wanted) - wanted[::-1].index(True)]
