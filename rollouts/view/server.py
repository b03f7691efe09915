"""The page of a trajectory file over HTTP on this machine: episodes are read when the page asks for them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast
from urllib.parse import urlsplit

from aiohttp import web

from renderers import TemplateRenderer
from renderers.messages import Modality
from rollouts.errors import RolloutsError
from rollouts.view.episode_data import encoded_json, episode_payload
from rollouts.view.growing_file import GrowingFile
from rollouts.view.media_frames import display_medium
from rollouts.view.page import PAGE_END, json_block, page_start, script_block
from transport.errors import TransportError

HOST: Final = "127.0.0.1"
#: The most lines of the list in one response.
MAX_ROWS: Final = 2000
#: A search ends after so many seconds, and goes on with the next request of the page.
SEARCH_SECONDS: Final = 0.4
_MAX_WANTED: Final = 8
_MAX_WANTED_CHARACTERS: Final = 400
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def viewer_app(
    store: GrowingFile,
    secret: str,
    *,
    renderer: TemplateRenderer | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> web.Application:
    """The application. Every path begins with `secret`, so that other users of this machine cannot read the file."""

    async def page(request: web.Request) -> web.Response:
        index = {"title": store.title, "episodes": [], "problems": [], "live": True}
        parts = [page_start(store.title, connects=True), json_block("index", index), script_block(), PAGE_END]
        return web.Response(body=b"".join(parts), content_type="text/html", charset="utf-8")

    one_search = asyncio.Semaphore(1)  # several pages must not take all threads

    async def index(request: web.Request) -> web.Response:
        found = {"episodes": store.rows(_start(request), MAX_ROWS), "problems": store.problems()}
        return web.Response(body=encoded_json(found), content_type="application/json")

    async def search(request: web.Request) -> web.Response:
        start, wanted = _start(request), request.query.getall("text", [])
        if not 0 < len(wanted) <= _MAX_WANTED or max(map(len, wanted)) > _MAX_WANTED_CHARACTERS:
            limit = f"1 to {_MAX_WANTED} texts of at most {_MAX_WANTED_CHARACTERS} characters"
            raise web.HTTPBadRequest(text=f"a search has {limit}")

        def matches() -> bytes:
            found, following = store.search(wanted, start, SEARCH_SECONDS)
            return encoded_json({"found": found, "next": following})

        async with one_search:
            return web.Response(body=await _read(matches), content_type="application/json")

    async def episode(request: web.Request) -> web.Response:
        number = int(request.match_info["number"])

        def payload() -> bytes:
            return episode_payload(store.episode(number), number, renderer=renderer, tools=tools)

        return web.Response(body=await _read(payload), content_type="application/octet-stream")

    async def medium(request: web.Request) -> web.Response:
        modality, digest = cast(Modality, request.match_info["modality"]), request.match_info["digest"]

        def shown() -> bytes:
            return encoded_json(display_medium(store.medium(modality, digest), modality))

        return web.Response(body=await _read(shown), content_type="application/json")

    app = web.Application(middlewares=[_only_this_machine], client_max_size=1024)
    app.router.add_get(f"/{secret}/", page)
    app.router.add_get(f"/{secret}/index", index)
    app.router.add_get(f"/{secret}/search", search)
    app.router.add_get(f"/{secret}/episodes/{{number:\\d{{1,9}}}}", episode)
    app.router.add_get(f"/{secret}/media/{{modality:image|video|audio}}-{{digest:[0-9a-f]{{64}}}}", medium)
    app.on_response_prepare.append(_add_headers)
    return app


async def serve_viewer(app: web.Application, secret: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve on 127.0.0.1 until cancelled. `on_ready` gets the address of the page. Raises `RolloutsError`."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            raise RolloutsError(
                f"port {port} of 127.0.0.1 cannot be used: {getattr(error, 'strerror', None) or str(error)}; "
                "pass another --port, or 0 for a free one"
            ) from error
        on_ready(f"http://{HOST}:{runner.addresses[0][1]}/{secret}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _start(request: web.Request) -> int:
    """The number of the first episode that is asked for."""
    start = request.query.get("from", "0")
    if not (start.isascii() and start.isdecimal()) or len(start) > 9:
        raise web.HTTPBadRequest(text=f"from={start[:40]!r} is not the number of an episode")
    return int(start)


async def _read(work: Callable[[], bytes]) -> bytes:
    """The result of `work` on a thread: reading, rendering and decoding take milliseconds to seconds."""
    try:
        return await asyncio.to_thread(work)
    except (RolloutsError, TransportError) as error:
        raise web.HTTPNotFound(text=str(error)) from error


@web.middleware
async def _only_this_machine(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    """Refuse requests that name another host: a foreign page whose name resolves to this machine could send them."""
    if urlsplit(f"//{request.host}").hostname not in (HOST, "localhost", "::1"):
        raise web.HTTPMisdirectedRequest(text="this viewer answers requests to 127.0.0.1 and localhost only")
    response: web.StreamResponse = await handler(request)
    return response


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
