"""Requests that `rollouts serve` refuses, in the form of OpenAI's API; its health and its metrics."""

import json
import threading
import urllib.error
import urllib.request

import pytest
from served_in_thread import ServedInThread

from rollouts.errors import ServerUnreachableError
from rollouts.serve import bodies as json_bodies
from rollouts.serve.app import create_app
from rollouts.serve.bodies import MAX_JSON_VALUES
from rollouts.serve.gateway.routes import Gateway
from rollouts.testing import ScriptedEngine


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "said"),
    [
        ("post", "/v1/nope", 404, "unknown_url", "POST /v1/nope: there is no such route"),
        ("post", "/v1/completions", 404, "unknown_url", "POST /v1/chat/completions"),
        ("get", "/sessions/s/nope", 404, "unknown_url", "GET /sessions/s/nope"),
        ("get", "/v1/chat/completions", 405, "method_not_supported", "this path takes POST"),
        ("post", "/v1/responses/compact", 405, "method_not_supported", "no conversation is shortened here"),
        ("post", "/sessions/s/v1/responses/input_tokens", 405, "method_not_supported", "messages/count_tokens"),
    ],
)
def test_an_unknown_route_of_openais_api_is_told_in_its_form(open_server, method, path, status, code, said):
    answer = getattr(open_server, method)(path, *([{}] if method == "post" else []))
    assert answer.status == status
    error = answer.json["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, code)
    assert said in error["message"]


@pytest.mark.parametrize("prefix", ["", "/sessions/s"])
@pytest.mark.parametrize("path", ["/v1/v1/messages", "/v1/messages/v1/messages", "/chat/completions", "/responses"])
def test_a_wrong_base_url_is_told_with_the_right_one_of_each_sdk(open_server, prefix, path):
    answer = open_server.post(prefix + path, {})
    root = open_server.base_url + prefix
    assert (answer.status, answer.json.get("type")) == (404, "error" if "messages" in path else None)
    assert f"{root}/v1 for OpenAI's SDK, and {root} for Anthropic's" in answer.json["error"]["message"]


def test_all_methods_of_a_path_with_several_routes_are_allowed(open_server):
    request = urllib.request.Request(f"{open_server.base_url}/sessions", method="PUT")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value as error:
        assert (error.status, error.headers["Allow"]) == (405, "GET, HEAD, POST")
        assert "takes GET and HEAD and POST" in json.load(error)["error"]["message"]


@pytest.mark.slow
def test_a_large_body_is_parsed_on_a_thread_and_not_on_the_loop(open_server, monkeypatch):
    threads, loads = [], json_bodies._loads

    def recorded(data):
        threads.append(threading.current_thread().name)
        return loads(data)

    monkeypatch.setattr(json_bodies, "_loads", recorded)
    body = {"messages": [{"role": "user", "content": "a" * 300_000}]}
    assert open_server.post("/v1/chat/completions", body).status == 200
    assert len(threads) == 1
    assert threads[0].startswith("asyncio_")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/v1/chat/completions", b'{"messages": [%s{}]}' % (b"{}," * MAX_JSON_VALUES)),
        ("/sessions", b'{"session_id": [%s5]}' % (b"5," * MAX_JSON_VALUES)),
    ],
)
def test_a_body_of_more_values_than_a_request_needs_is_refused_before_it_becomes_python_objects(
    open_server, monkeypatch, path, text
):
    parsed = []
    monkeypatch.setattr(json, "loads", lambda data, **options: parsed.append(len(data)) or {})
    refused = open_server.post(path, text)
    monkeypatch.undo()
    assert (refused.status, parsed) == (400, [])
    assert "commas" in refused.json["error"]["message"]


def test_the_metrics_have_the_sessions_and_their_bytes(renderer):
    app = create_app(Gateway(ScriptedEngine(lambda request: "x", renderer=renderer), renderer))
    with ServedInThread(app) as server:
        body = {"messages": [{"role": "user", "content": "a"}]}
        assert server.post("/sessions/s/v1/chat/completions", body).status == 200
        lines = map(str.split, server.get("/metrics").body.decode().splitlines())
        values = {name: float(value) for name, *_, value in lines if name != "#"}
        (session,) = server.get("/sessions").json["sessions"]
    assert values.pop("process_start_time_seconds") > 1e9
    assert values == {
        "mmrollouts_gateway_sessions": 1,
        "mmrollouts_gateway_requests_in_flight": 0,
        "mmrollouts_gateway_session_bytes": session["estimated_bytes"],
    }


@pytest.mark.parametrize(
    ("error", "status"), [(None, 200), (ServerUnreachableError("check_health", "connection refused"), 503)]
)
def test_the_health_is_that_of_the_server_behind_the_gateway(renderer, error, status):
    class Server(ScriptedEngine):
        async def check_health(self):
            if error is not None:
                raise error

    engine = Server(lambda request: "x", renderer=renderer)
    with ServedInThread(create_app(Gateway(engine, renderer))) as server:
        assert server.get("/health").status == status
