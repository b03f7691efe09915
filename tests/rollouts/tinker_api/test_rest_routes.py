"""The routes that list and hand out runs, checkpoints and sessions, used by the client and the command of `tinker`."""

import json
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from served_in_thread import ServedInThread
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from rollouts.errors import RolloutsError
from rollouts.serve.errors import RequestError
from rollouts.tinker.rest_routes import FILES_PATH, rest_routes
from rollouts.tinker.run_directory import RunDirectory, TrainingRun

tinker = pytest.importorskip("tinker")
START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LORA = {"rank": 8, "train_mlp": True, "train_attn": False, "train_unembed": True}
KEY = "tml-a-key"


class Registry:
    """The sessions of a server that runs."""

    def __init__(self):
        self.finished = []

    def sessions(self):
        return [
            SimpleNamespace(session_id="first", samplers=[], user_metadata=None, display_name=None),
            SimpleNamespace(
                session_id="s", samplers=["s:sample:0"], user_metadata={"who": "me"}, display_name="a session"
            ),
        ]

    @property
    def sampling(self):
        found = SimpleNamespace(base_model="tiny", model_path="tinker://s:train:0/sampler_weights/a")
        return SimpleNamespace(session={"s:sample:0": found}.get)

    def finish_session(self, session_id):
        self.finished.append(session_id)


@pytest.fixture
def directory(tmp_path):
    runs = RunDirectory(tmp_path / "runs")
    runs.add_run(TrainingRun("s:train:0", "tiny", "s", LORA, START, {"who": "me"}))
    return runs


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture
def app(directory, registry):
    async def on_error(_, error):
        return JSONResponse({"error": str(error)}, getattr(error, "status", 400))

    async def empty(_):
        return JSONResponse({})

    config = [Route(f"/api/v1/client/{name}", empty, methods=["POST"]) for name in ("config", "dynamic_config")]
    return Starlette(
        routes=[*rest_routes(directory, registry), *config],
        exception_handlers={RolloutsError: on_error, RequestError: on_error},
    )


@pytest.fixture
def web(app):
    return TestClient(app)


@pytest.fixture
def served(app):
    with ServedInThread(app) as server:
        yield server


@pytest.fixture
def rest(served):
    return tinker.RestClient(base_url=served.base_url, api_key=KEY)


def save(directory, name, *, kind="weights", model_id="s:train:0", files=None, **options):
    with directory.saving(model_id, kind, name, **options) as path:
        for file, content in (files or {"file": b"12345"}).items():
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_bytes(content)
    return directory.checkpoint(model_id, kind, name)


def test_the_client_gets_what_a_run_is_and_its_last_checkpoints(directory, rest):
    save(directory, "0001")
    newest = save(directory, "0002", user_metadata={"step": "2"})
    sampler = save(directory, "0001", kind="sampler_weights")
    run = rest.get_training_run("s:train:0").result()
    assert (run.base_model, run.is_lora, run.lora_rank, run.corrupted) == ("tiny", True, 8, False)
    assert run.user_metadata == {"who": "me"}
    assert run.last_request_time > START
    assert (run.last_checkpoint.tinker_path, run.last_checkpoint.time) == (newest.uri, newest.created)
    assert run.last_checkpoint.user_metadata == {"step": "2"}
    assert run.last_sampler_checkpoint.tinker_path == sampler.uri
    assert rest.get_training_run_by_tinker_path(newest.uri).result() == run


def test_the_pages_of_all_runs_and_checkpoints_are_each_of_them_once(directory, rest):
    for number in range(1, 8):
        directory.add_run(TrainingRun(f"s:train:{number}", "tiny", "s", None, START + timedelta(hours=number)))
        save(directory, "a", model_id=f"s:train:{number}")
    found = []
    for offset in (0, 3, 6, 9):
        page = rest.list_training_runs(limit=3, offset=offset).result()
        assert (page.cursor.limit, page.cursor.offset, page.cursor.total_count) == (3, offset, 8)
        found += [run.training_run_id for run in page.training_runs]
    assert found == [f"s:train:{number}" for number in reversed(range(8))]
    assert rest.list_training_runs().result().training_runs[0].is_lora is False

    pages = [rest.list_user_checkpoints(limit=4, offset=offset).result() for offset in (0, 4)]
    assert [len(page.checkpoints) for page in pages] == [4, 3]
    assert {each.tinker_path for page in pages for each in page.checkpoints} == {
        f"tinker://s:train:{number}/weights/a" for number in range(1, 8)
    }


def test_the_client_deletes_a_checkpoint_and_sets_when_it_expires(directory, rest):
    kept, deleted = save(directory, "a"), save(directory, "b")
    rest.delete_checkpoint_from_tinker_path(deleted.uri).result()
    rest.set_checkpoint_ttl_from_tinker_path(kept.uri, 7200).result()
    (listed,) = rest.list_checkpoints("s:train:0").result().checkpoints
    assert timedelta(seconds=7100) < listed.expires_at - datetime.now(UTC) <= timedelta(seconds=7200)
    rest.set_checkpoint_ttl_from_tinker_path(kept.uri, None).result()
    assert rest.list_checkpoints("s:train:0").result().checkpoints[0].expires_at is None
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        rest.delete_checkpoint_from_tinker_path(deleted.uri).result()


def test_the_client_gets_what_weights_are_of(directory, rest):
    info = rest.get_weights_info_by_tinker_path(save(directory, "a").uri).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == ("tiny", True, 8)
    assert (info.train_mlp, info.train_attn, info.train_unembed) == (True, False, True)
    with pytest.raises(tinker.NotFoundError, match="never saved whole"):
        rest.get_weights_info_by_tinker_path("tinker://s:train:0/weights/b").result()


def test_sessions_of_this_server_and_of_earlier_ones_are_listed_and_found(directory, rest, registry):
    directory.add_run(TrainingRun("s:train:1", "tiny", "s", None, START + timedelta(hours=1)))
    directory.add_run(TrainingRun("old:train:0", "tiny", "old", None, START))
    assert rest.list_sessions().result().sessions == ["s", "first", "old"]
    assert rest.list_sessions(limit=1, offset=1).result().sessions == ["first"]
    session = rest.get_session("s").result()
    assert (session.training_run_ids, session.sampler_ids) == (["s:train:0", "s:train:1"], ["s:sample:0"])
    assert (session.user_metadata, session.display_name) == ({"who": "me"}, "a session")
    assert rest.get_session("old").result().training_run_ids == ["old:train:0"]
    with pytest.raises(tinker.NotFoundError, match="there is no session 'none'"):
        rest.get_session("none").result()


def test_a_session_is_finished(web, directory, registry):
    directory.add_run(TrainingRun("old:train:0", "tiny", "old", None, START))
    for session_id in ("s", "old"):  # of the other one the server has nothing to end
        body = {"reason": {"type": "errored"}, "detail": "why"}
        assert web.post(f"/api/v1/sessions/{session_id}/finish", json=body).status_code == 204
    assert registry.finished == ["s"]
    assert web.post("/api/v1/sessions/x/finish", json={"reason": {"type": "success"}}).status_code == 404


def test_a_sampler_has_its_model_and_path(rest):
    sampler = rest.get_sampler("s:sample:0").result()
    assert (sampler.sampler_id, sampler.base_model) == ("s:sample:0", "tiny")
    assert sampler.model_path == "tinker://s:train:0/sampler_weights/a"
    with pytest.raises(tinker.NotFoundError, match="no sampling session"):
        rest.get_sampler("s:sample:1").result()


FILES = {"adapter_config.json": b"{}", "deep/adapter model.safetensors": bytes(range(256)) * 4096}


def test_files_are_fetched_from_signed_urls_without_a_key(directory, rest):
    uri = save(directory, "a", kind="external_weights", files=FILES).uri
    answer = rest.get_external_weights_urls(uri).result()
    fetched = {}
    for file, url in answer.urls.items():
        with urllib.request.urlopen(url) as response:
            fetched[file] = response.read()
    assert fetched == FILES
    assert timedelta(minutes=55) < answer.expires - datetime.now(UTC) <= timedelta(hours=1)


def status(url):
    try:
        with urllib.request.urlopen(url) as response:
            return response.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


@pytest.mark.slow
def test_a_signature_is_of_one_file_and_one_time(directory, rest, served):
    first = save(directory, "a", kind="external_weights", files={"one": b"1", "two": b"2"})
    save(directory, "b", kind="external_weights", files={"one": b"secret"})
    urls = rest.get_external_weights_urls(first.uri).result().urls
    signed = urls["one"]
    assert status(signed) == 200
    expires = signed.partition("expires=")[2].partition("&")[0]
    assert status(signed.replace("/one?", "/two?")) == 403
    assert status(signed.replace("/a/", "/b/")) == 403
    assert status(signed.replace(f"expires={expires}", f"expires={int(expires) + 1}")) == 403
    assert status(signed.partition("?")[0]) == 403
    assert status(signed[:-1] + ("0" if signed[-1] != "0" else "1")) == 403
    assert status(signed + "%C3%A9") == 403
    directory.delete(first)
    assert status(signed) == 404
    again = Starlette(routes=rest_routes(directory, Registry()), exception_handlers=served.app.exception_handlers)
    url = rest.get_external_weights_urls("tinker://s:train:0/external_weights/b").result().urls["one"]
    with ServedInThread(again) as other:  # another process has another secret
        assert status(url.replace(served.base_url, other.base_url)) == 403


@pytest.mark.parametrize(
    "path",
    [
        "s:train:0/external_weights/a/../../run.json", "s:train:0/external_weights/a/%2e%2e/%2e%2e/run.json",
        "s:train:0/external_weights/a//etc/passwd", "s:train:0/external_weights/%2e%2e/file",
        "../secret/x/file", "s:train:0/external_weights/a/%2Fetc%2Fpasswd", "s:train:0/external_weights/a.json/file",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_a_checkpoint(directory, served, path):
    save(directory, "a", kind="external_weights")
    assert status(f"{served.base_url}{FILES_PATH}{path}?expires=99999999999&signature=00") in (403, 404)


@pytest.mark.slow
def test_what_the_service_has_and_this_server_has_not_is_refused_at_once_with_the_reason(directory, rest):
    """With a status after which the client does not try again for minutes."""
    uri = save(directory, "a").uri
    for call, reason in [
        (lambda: rest.publish_checkpoint_from_tinker_path(uri), "publishes nothing"),
        (lambda: rest.assign_session_project("s", "p"), "no projects"),
        (lambda: rest.export_session_trace("s"), "no traces"),
        (lambda: rest.list_training_runs(project_id="p"), "no projects"),
        (lambda: rest.copy_weights(uri, destination_project_id="p"), "no projects"),
    ]:
        with pytest.raises(tinker.APIStatusError, match=reason) as caught:
            call().result()
        assert caught.value.status_code in (400, 404)


@pytest.mark.parametrize("query", ["limit=0", "limit=-1", "limit=x", "offset=-1", "limit=1e3", "offset=" + "9" * 30])
def test_a_page_that_is_none_is_refused(web, query):
    for path in ("training_runs", "checkpoints", "sessions"):
        answer = web.get(f"/api/v1/{path}?{query}")
        assert answer.status_code == 400
        assert query.partition("=")[0] in answer.json()["error"]


@pytest.mark.parametrize("body", [{}, {"ttl_seconds": "1"}, {"ttl_seconds": 0}, {"ttl_seconds": True}, [], b"{"])
def test_a_body_without_a_time_to_live_is_refused(web, directory, body):
    save(directory, "a")
    text = body if isinstance(body, bytes) else json.dumps(body)
    sent = {"content": text, "headers": {"Content-Type": "application/json"}}
    answer = web.put("/api/v1/training_runs/s:train:0/checkpoints/weights/a/ttl", **sent)
    assert answer.status_code == 400
    assert web.post("/api/v1/weights_info", **sent).status_code == 400
