"""`ServerRenderer` for code without `await`: every call runs on one event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, ParamSpec, Self, TypeVar

from renderers import MediaItem, MediaSource, RenderedTokens
from renderers.fork_reset import register_fork_reset
from renderers.media.fetching import on_event_loop
from renderers.media.item import Modality
from renderers.media.policy import MediaPolicy
from renderers.media.store import MediaStore
from rollouts.engines.vllm.rendering.render_client import ServerIdentity
from rollouts.engines.vllm.rendering.server_renderer import Chunk, ServerRenderer
from rollouts.errors import EngineClosedError, InvalidRequestError

P = ParamSpec("P")
T = TypeVar("T")

_NAME = "blocking render"


class BlockingServerRenderer:
    """A `ServerRenderer` with blocking methods.

        with BlockingServerRenderer(ServerRenderer.connect("http://127.0.0.1:8000")) as renderer:
            rendered = renderer.render(messages, add_generation_prompt=True)

    Many threads may call it at the same time; the calls run concurrently. The event loop runs in a daemon thread
    from the first call until `close`; in a forked process, in a thread of that process. A call on the thread of a
    running event loop would block that loop and raises `InvalidRequestError`.
    """

    def __init__(self, renderer: ServerRenderer) -> None:
        self._renderer = renderer
        self._closed = False
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """The first call of a forked process starts a thread of its own."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedTokens:
        """`ServerRenderer.render`."""
        return self._wait(
            self._renderer.render,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )

    def render_chunks(self, chunks: Iterable[Chunk]) -> RenderedTokens:
        """`ServerRenderer.render_chunks`."""
        return self._wait(self._renderer.render_chunks, chunks)

    def image(self, reference: Any) -> MediaItem:
        """`ServerRenderer.image`."""
        return self._wait(self._renderer.image, reference)

    def identity(self) -> ServerIdentity:
        """`ServerRenderer.identity`."""
        return self._wait(self._renderer.identity)

    @property
    def processors(self) -> dict[Modality, ServerImageProcessor]:
        """The processor of each modality, as on a renderer that was loaded from a directory; empty for a text model."""
        marker = self.identity().marker
        if marker is None:
            return {}
        return {"image": ServerImageProcessor(self, marker, self._renderer.policy, self._renderer.store)}

    def close(self) -> None:
        """Cancel running calls, close the `ServerRenderer` and end the thread. A second call does nothing."""
        with self._lock:
            loop, thread, self._loop, self._closed = self._loop, self._thread, None, True
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._renderer.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wait(self, method: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        if on_event_loop():
            raise InvalidRequestError(
                _NAME,
                "a blocking call on the thread of a running event loop would block that loop; await the ServerRenderer "
                "itself, or make this call in asyncio.to_thread",
            )
        with self._lock:  # so that a concurrent `close` cancels the call that starts here
            if self._closed:
                raise EngineClosedError(_NAME, "the renderer is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name="server-renderer", daemon=True)
                self._thread.start()
            running = asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self._loop)
        try:
            return running.result()
        except CancelledError:
            raise EngineClosedError(_NAME, "the renderer was closed before the call finished") from None
        except KeyboardInterrupt:
            running.cancel()
            raise


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then cancel its remaining tasks."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()


class ServerImageProcessor:
    """`MediaProcessor` that uses a server; it recreates the items of a trajectory from their sources.

        samples_from_trajectory(episode, advantage=1.0, processors=renderer.processors)

    The identity of the server is looked up at every call: `mm_hash` changes when the server becomes another one.
    """

    modality: Modality = "image"

    def __init__(self, renderer: BlockingServerRenderer, marker: str, policy: MediaPolicy, store: MediaStore) -> None:
        self._renderer = renderer
        self.marker = self.embed_token = marker
        self.policy = policy
        self.store = store

    @property
    def fingerprint(self) -> str:
        """Digest of the server's version, its model and what it makes of a probe image."""
        return self._renderer.identity().fingerprint

    def mm_hash(self, source: MediaSource) -> str:
        """The digest of the pixels as the model sees them: source digest + fingerprint."""
        return f"{source.digest}-{self.fingerprint}"

    def process(self, source: MediaSource) -> MediaItem:
        """The item of a source, from the store or the server. Raises `MediaError` and `EngineError`."""
        return self._renderer.image(source)
