"""`rollouts view --serve`: what is served, to whom, and while a file grows."""

import hashlib
import http.client
import json
import socket
import time
from urllib.parse import urlsplit

import numpy as np
import pytest
from served_viewer import served
from typer.testing import CliRunner
from viewer_episodes import failed, media_episode, read_payload, sound_source, tone, two_turns, video

from rollouts.cli.main import app
from rollouts.errors import RolloutsError
from rollouts.view.growing_file import GrowingFile
from rollouts.view.server import HOST
from transport import RecordWriter
from transport.errors import TransportError


def get(url, path="", host=None):
    """The status, the headers and the body of a response."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    try:
        connection.request("GET", parts.path + path, headers={"Host": host} if host else {})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def rows_when(url, count):
    """The lines of the list once there are `count` of them."""
    deadline = time.monotonic() + 60
    while True:
        _, _, body = get(url, "index?from=0")
        found = json.loads(body)
        if len(found["episodes"]) >= count:
            return found
        assert time.monotonic() < deadline, found


@pytest.fixture(scope="module")
def file(renderer, tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "episodes.mmr"
    with RecordWriter(path) as out:
        out.append([two_turns(renderer), failed()])
        out.append({"no": "episode"})
        out.append(media_episode(("video", video()), ("audio", sound_source(tone(), 44_100))))
    return path


@pytest.fixture(scope="module")
def url(file):
    with served(file) as address:
        rows_when(address, 3)
        yield address


@pytest.mark.slow
def test_episodes_and_media_are_served_as_a_page_has_them(url, renderer):
    found = rows_when(url, 3)
    assert [row["id"] for row in found["episodes"]] == ["two-turns", "failed", "media"]
    assert found["problems"] == ["record 1: it holds a dict and no episode"]
    header, columns = read_payload(get(url, "episodes/0")[2])
    trajectory = two_turns(renderer)
    assert header["id"] == "two-turns"
    ids = np.concatenate([node.token_ids for node in trajectory.nodes])
    assert np.array_equal(columns["uniqueIds"][columns["index"]], ids)
    medium = json.loads(get(url, f"media/image-{header['nodes'][0]['media'][0]['digest']}")[2])
    assert (medium["width"], len(medium["frames"])) == (32, 1)
    digest = hashlib.sha256(sound_source(tone(), 44_100)).hexdigest()
    assert json.loads(get(url, f"media/audio-{digest}")[2])["sound"]["seconds"] == 2
    assert get(url, f"media/image-{digest}")[0] == 404  # it is no image of an episode


@pytest.mark.slow
def test_a_search_reads_the_texts_of_messages_in_bounded_time(file, url):
    for query, found in (("blue", [0]), ("BLUE&text=red.", [0]), ("no such text", []), ("user", [])):
        status, _, body = get(url, f"search?from=0&text={query.replace(' ', '%20')}")
        assert (status, json.loads(body)) == (200, {"found": found, "next": 3}), query
    assert json.loads(get(url, "search?from=1&text=blue")[2]) == {"found": [], "next": 3}
    assert json.loads(get(url, "search?from=9&text=blue")[2]) == {"found": [], "next": 9}
    store = GrowingFile(file)
    try:
        while len(store.rows(0, 10)) < 3:
            time.sleep(0.01)
        assert store.search(["blue"], 0, seconds=0.0) == ([0], 2)  # one record, which has two episodes
        assert store.search(["blue"], 2, seconds=0.0) == ([], 3)
    finally:
        store.close()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("search?from=0&text=" + "x" * 401, 400),
        ("search?from=0" + "&text=x" * 9, 400),
        ("search?from=%C2%B2&text=x", 400),
        ("episodes/-1", 404),
        ("media/image-" + "0" * 64, 404),
        ("media/../../etc/passwd", 404),
        ("index?from=99999999999", 400),
    ],
)
def test_other_paths_are_refused(url, path, status):
    assert get(url, path)[0] == status


def test_only_a_request_that_has_the_secret_and_names_this_machine_is_answered(url):
    parts = urlsplit(url)
    assert len(parts.path.strip("/")) >= 20
    for path in ("/", "/index", "/wrong-secret/index", "/wrong-secret/"):
        assert get(f"http://{parts.netloc}{path}")[0] == 404
    assert get(url, host="attacker.example")[0] == 421
    assert get(url, "index", host=f"attacker.example:{parts.port}")[0] == 421
    assert get(url, host=f"localhost:{parts.port}")[0] == 200


def test_responses_are_not_kept_or_framed_and_the_page_may_connect_to_its_own_server_only(url):
    status, headers, body = get(url)
    assert status == 200
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert "connect-src &#x27;self&#x27;;" in body.decode()


def test_the_server_listens_on_the_loopback_address_alone(url):
    port = urlsplit(url).port
    assert urlsplit(url).hostname == HOST == "127.0.0.1"
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {HOST}
    for address in others - {one for one in others if one.startswith("127.")}:
        with socket.socket() as client:
            client.settimeout(5)
            assert client.connect_ex((address, port)) != 0


@pytest.mark.slow
def test_a_file_that_is_cut_off_is_named_and_its_episodes_are_errors(renderer, tmp_path):
    path = tmp_path / "cut.mmr"
    with RecordWriter(path) as out:
        out.append(two_turns(renderer))
    store = GrowingFile(path)
    try:
        while not store.rows(0, 1):
            time.sleep(0.01)
        with open(path, "r+b") as file:
            file.truncate(100)
        with pytest.raises(TransportError, match=r"cut\.mmr"):
            store.episode(0)
        deadline = time.monotonic() + 30
        while not store.problems():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert store.problems()[0].startswith("the file is no longer followed")
        with pytest.raises(RolloutsError, match="does not have it"):
            store.episode(1)
    finally:
        store.close()


@pytest.mark.slow
def test_a_port_in_use_and_options_that_exclude_each_other_are_errors_of_one_line(file):
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["view", str(file), "--serve", "--port", str(port)])
    assert result.exit_code == 2
    assert f"port {port} of 127.0.0.1 cannot be used" in result.stderr
    result = CliRunner().invoke(app, ["view", str(file), "--serve", "--out", "x.html"])
    assert result.exit_code == 2
    assert "--serve writes no file" in result.stderr
