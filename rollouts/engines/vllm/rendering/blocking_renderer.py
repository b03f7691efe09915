"""`ServerRenderer` for code that does not await: every call runs on one event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from renderers import MediaItem, RenderedTokens
from renderers.media.event_loop import on_event_loop
from renderers.media.item import Modality
from rollouts.engines.vllm.rendering.prompt_chunks import Chunk
from rollouts.engines.vllm.rendering.render_server import ServerIdentity
from rollouts.engines.vllm.rendering.server_processor import ServerImageProcessor
from rollouts.errors import EngineClosedError, InvalidRequestError

if TYPE_CHECKING:
    from rollouts.engines.vllm.rendering.server_renderer import ServerRenderer

T = TypeVar("T")

_NAME = "blocking render"


class BlockingServerRenderer:
    """Waits for a `ServerRenderer`; safe to call from many threads at once, whose calls run side by side.

    The loop lives from the first call to `close`, in a daemon thread. A call on the thread of a running event loop,
    which would stand still meanwhile, raises `InvalidRequestError`; so does one after a fork of the process.
    """

    def __init__(self, renderer: ServerRenderer) -> None:
        self._renderer = renderer
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedTokens:
        """`ServerRenderer.render`."""
        self._check_may_wait()
        return self._wait(
            self._renderer.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs=chat_template_kwargs,
            )
        )

    def render_chunks(self, chunks: Iterable[Chunk]) -> RenderedTokens:
        """`ServerRenderer.render_chunks`."""
        self._check_may_wait()
        return self._wait(self._renderer.render_chunks(chunks))

    def image(self, reference: Any) -> MediaItem:
        """`ServerRenderer.image`."""
        self._check_may_wait()
        return self._wait(self._renderer.image(reference))

    def identity(self) -> ServerIdentity:
        """`ServerRenderer.identity`."""
        self._check_may_wait()
        return self._wait(self._renderer.identity())

    @property
    def processors(self) -> dict[Modality, ServerImageProcessor]:
        """By modality, as a renderer that is loaded from a directory has them: what makes items of sources again."""
        marker = self.identity().marker
        if marker is None:
            return {}
        return {
            "image": ServerImageProcessor(self, marker=marker, policy=self._renderer.policy, store=self._renderer.store)
        }

    def close(self) -> None:
        """Cancel what is running, close the renderer's connection if it is its own, and end the thread. Idempotent."""
        with self._lock:
            loop, thread, self._loop, self._closed = self._loop, self._thread, None, True
        if loop is None or thread is None or self._process != os.getpid():
            return
        asyncio.run_coroutine_threadsafe(self._renderer.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_may_wait(self) -> None:
        if on_event_loop():
            raise InvalidRequestError(
                _NAME,
                "the blocking form was called on the thread of a running event loop, which would stand still; await "
                "the ServerRenderer itself, or call this in asyncio.to_thread",
            )
        if self._process != os.getpid():
            raise InvalidRequestError(_NAME, "the process was forked; make a ServerRenderer of its own in the child")

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with self._lock:  # so that what is begun here is cancelled by a `close` that comes now
            if self._closed:
                coroutine.close()
                raise EngineClosedError(_NAME, "the renderer is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name="server-renderer", daemon=True)
                self._thread.start()
            running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return running.result()
        except CancelledError:
            raise EngineClosedError(_NAME, "the renderer was closed before it was done") from None
        except KeyboardInterrupt:
            running.cancel()
            raise


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then cancel what is left on it."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()
