"""The keys of a server of the Tinker API: each is a user of its own."""

import hmac
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rollouts.tinker.rest_routes import FILES_PATH, HEALTH_PATH
from rollouts.tinker.service import Service


class KeyDispatch:
    """Hands a request to the application of its `X-API-Key`; status 401 without a known one.

    Signed URLs of files need no key: they go to the application whose directory has the model. Nor does the
    health check, which any of them answers.
    """

    def __init__(self, apps: Mapping[str, tuple[Service, ASGIApp]]) -> None:
        self._apps = {key.encode(): app for key, app in apps.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp | None = None
        if scope["path"].startswith(FILES_PATH):
            model_id = scope["path"].removeprefix(FILES_PATH).partition("/")[0]
            app = next((app for service, app in self._apps.values() if service.directory.has_run(model_id)), None)
        elif scope["path"] == HEALTH_PATH:
            app = next(app for _, app in self._apps.values())
        sent = Headers(scope=scope).get("x-api-key", "").encode("latin-1")
        for key, (_, own) in self._apps.items():  # all of them: the time says nothing
            if hmac.compare_digest(sent, key):
                app = app or own
        if app is None:
            text = "this server needs a key of its --api-key-file; set TINKER_API_KEY to it"
            app = JSONResponse({"detail": text, "error": text, "category": "user"}, 401)
        await app(scope, receive, send)
