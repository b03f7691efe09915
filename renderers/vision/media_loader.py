"""Loads and processes the media of a conversation, each distinct one once.

Media that were loaded before cost a look-up. New ones are loaded and processed in parallel on threads (decoding,
resizing and hashing release the interpreter's lock); two callers with the same new image wait for one processing.
"""

import itertools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from renderers.errors import MediaError, MessageError
from renderers.media.item import MediaItem, MediaSource
from renderers.messages import MEDIA_PART_TYPES, PLURALS, Modality, media_parts
from renderers.process.fork_reset import register_fork_reset
from renderers.process.threads import DaemonThreads, available_cores, on_event_loop
from renderers.vision.media_markers import LocatedItem
from renderers.vision.processor import MediaProcessor


class _Part(NamedTuple):
    message_index: int
    part_index: int
    part: Mapping[str, Any]
    processor: MediaProcessor


class MediaLoader:
    """Safe to share between threads. `missing` gives for a modality without a processor the reason and the cure."""

    def __init__(
        self,
        processors: Mapping[Modality, MediaProcessor],
        *,
        model: str,
        missing: Mapping[Modality, str] | None = None,
    ) -> None:
        self.processors = processors
        self._model = model
        self._missing = missing or {}
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """A forked process lacks the threads of its parent, so it must not wait for their work."""
        self._lock = threading.Lock()
        self._in_flight: dict[str, Future[MediaItem]] = {}
        self._threads: DaemonThreads | None = None

    def load(self, messages: Sequence[Mapping[str, Any]]) -> list[LocatedItem]:
        """The items of checked messages, in their order.

        Raises `MessageError` and `MediaError`, both naming message and part; `MediaFetchError` where a
        URL would have to be fetched on the thread of a running event loop.
        """
        parts = self._parts(messages)
        if not parts:
            return []
        items = [self._cached_item(part) for part in parts]
        missing = [part for part, item in zip(parts, items, strict=True) if item is None]
        if missing:
            if len(missing) == 1 or on_event_loop():  # an event loop may not wait for a fetch on another thread either
                made = iter([self._item(part) for part in missing])
            else:
                futures = [self._pool().submit(self._item, part) for part in missing]
                wait(futures)  # so that all have ended before the first error, in the order of the parts, is raised
                made = iter([future.result() for future in futures])
            items = [next(made) if item is None else item for item in items]
        return [
            LocatedItem(part.message_index, part.part_index, item)
            for part, item in zip(parts, items, strict=True)
            if item is not None
        ]

    def prefetch(self, messages: Sequence[Mapping[str, Any]]) -> Future[list[MediaItem]]:
        """Start to load and process the media of checked messages, and return at once.

        The result keeps the items in memory even if the store evicts them. An error is raised by the result, and again
        when the messages are rendered.
        """
        parts = self._parts(messages)
        futures = [self._pool().submit(self._item, part) for part in parts]
        all_items: Future[list[MediaItem]] = Future()
        done = itertools.count(1)  # its `next` is atomic

        def gather_after_the_last(_: Future[MediaItem]) -> None:
            if next(done) < len(futures) or not all_items.set_running_or_notify_cancel():
                return
            error = next((error for future in futures if (error := future.exception()) is not None), None)
            if error is not None:
                all_items.set_exception(error)
            else:
                all_items.set_result([future.result() for future in futures])

        if not futures:
            all_items.set_result([])
        for future in futures:
            future.add_done_callback(gather_after_the_last)
        return all_items

    def _parts(self, messages: Sequence[Mapping[str, Any]]) -> list[_Part]:
        return [
            _Part(index, part_index, part, self._processor(part["type"], index, part_index))
            for index, message in enumerate(messages)
            if type(message.get("content")) is not str  # skips the search of most messages
            for part_index, part in media_parts(message)
        ]

    def modality(self, part: Mapping[str, Any], message_index: int, part_index: int) -> Modality:
        """The modality of a part that is not loaded. Raises `MessageError` as `load` does."""
        return self._processor(part["type"], message_index, part_index).modality

    def reads_sound(self, modality: Modality) -> bool:
        """Whether media of this modality, videos, are processed together with the sound inside of them."""
        return getattr(self.processors.get(modality), "reads_sound", False)

    def _processor(self, kind: str, message_index: int, part_index: int) -> MediaProcessor:
        modality = MEDIA_PART_TYPES[kind]
        processor = self.processors.get(modality)
        if processor is None:
            readable = " and ".join(PLURALS[known] for known in self.processors) or "text"
            reason = self._missing.get(modality) or (
                f"{self._model} reads only {readable}. Remove the part, or load a model directory with "
                f"{'video_' if modality == 'video' else ''}preprocessor_config.json or processor_config.json "
                f"for {PLURALS[modality]}"
            )
            raise MessageError(
                f"a part of type {kind!r}, but {reason}", message_index=message_index, part_index=part_index
            )
        return processor

    def _cached_item(self, part: _Part) -> MediaItem | None:
        from renderers.media.reference import cached_source  # loads Pillow, which text-only models do not need

        try:
            source = cached_source(part.part, part.processor.policy, part.processor.store)
        except MediaError as error:
            raise error.at(part.message_index, part.part_index) from error.__cause__
        return None if source is None else part.processor.store.get(part.processor.mm_hash(source))

    def _item(self, part: _Part) -> MediaItem:
        from renderers.media.reference import load_source

        try:
            source = load_source(part.part, part.processor.policy, part.processor.store)
            return self._processed(source, part.processor)
        except MediaError as error:
            raise error.at(part.message_index, part.part_index) from error.__cause__

    def _processed(self, source: MediaSource, processor: MediaProcessor) -> MediaItem:
        mm_hash = processor.mm_hash(source)
        cached = processor.store.get(mm_hash)
        if cached is not None:
            return cached
        own: Future[MediaItem] = Future()
        running = self._in_flight.setdefault(mm_hash, own)  # atomic
        if running is not own:
            return running.result()
        try:
            item = processor.process(source)
            own.set_result(item)
            return item
        except BaseException as error:
            own.set_exception(error)
            raise
        finally:
            del self._in_flight[mm_hash]

    def _pool(self) -> DaemonThreads:
        with self._lock:
            if self._threads is None:
                self._threads = DaemonThreads(min(8, available_cores()), "media")
            return self._threads
