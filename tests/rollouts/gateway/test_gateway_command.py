"""Chat completions of a real `rollouts serve`: trained on, their log-probabilities are those of the model."""

import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import openai
import pytest
import torch
from engine_server import EngineVLLM
from gateway_server import IMAGE, OTHER_IMAGE, TOOLS, image_part
from server_thread import served
from transformers import AutoModelForImageTextToText

from renderers import load_renderer
from rollouts.training import TrainingBatch, mismatch_report, samples_from_trajectory, token_logprobs
from transport import read_records

KEY = "a-key-of-this-test"


@contextmanager
def serving(folder, *arguments):
    """The address of `rollouts serve`, and its process."""
    main = "from rollouts.cli.main import main; main()"
    pipe = subprocess.PIPE
    with open(folder / "stderr", "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", main, "serve", "--port", "0", *arguments], stdout=pipe, stderr=errors, text=True
        )
    try:
        line = process.stdout.readline()
        assert "serving policy" in line, (folder / "stderr").read_text()
        yield line.partition(") at ")[2].split()[0], process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def command(tiny_model_dir, tmp_path_factory):
    """The address of the server, its process, and the record file that it writes."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "key").write_text(KEY)
    arguments = ["--model", str(tiny_model_dir), "--name", "policy"]
    arguments += ["--api-key-file", str(folder / "key"), "--record", str(folder / "chats.mmr")]
    with serving(folder, *arguments) as (url, process):
        yield url, process, folder / "chats.mmr"


def test_what_a_client_samples_is_recorded_with_the_log_probabilities_of_the_model(command, tiny_model_dir):
    url, process, record = command
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, default_headers={"X-Session-ID": "s"})
    messages = [{"role": "user", "content": [image_part(IMAGE), {"type": "text", "text": "Which?"}]}]
    for image in (OTHER_IMAGE, IMAGE, None):
        response = client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, max_tokens=12, seed=len(messages), temperature=0.9
        )
        new = {"role": "user", "content": "And?" if image is None else [image_part(image)]}
        messages += [response.choices[0].message, new]
    response = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, max_tokens=12, n=2)
    headers = {"Authorization": f"Bearer {KEY}"}
    reward = httpx.post(f"{url}/sessions/s/reward", json={"reward": 1.0}, headers=headers)
    assert reward.json()["turns"] == 5
    renderer = load_renderer(tiny_model_dir)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130  # interrupted
    assert process.stdout.read() == ""  # after the line that says where it serves
    assert "Traceback" not in (record.parent / "stderr").read_text()

    (trajectory,) = read_records(record)
    assert (trajectory.num_turns, trajectory.reward, len(trajectory.leaves())) == (5, 1.0, 2)
    samples = samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    model = AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32)
    with torch.no_grad():
        report = mismatch_report(batch, token_logprobs(model, batch))
    assert report.tokens == sum(len(trajectory.nodes[turn.node]) for turn in trajectory.turns)
    assert report.max_abs < 1e-4


@pytest.fixture(scope="module")
def relay(tiny_model_dir):
    """The arguments of a server over another one, which starts without torch."""
    with served(EngineVLLM(tiny_model_dir)) as upstream:
        model = ["--model", str(tiny_model_dir), "--name", "policy"]
        yield [*model, "--engine", "vllm", "--base-url", upstream.base_url]


def begin(url, name):
    """Begin a session whose trajectory takes more bytes than the full disk below has."""
    messages = [{"role": "user", "content": "word " * 400}]
    body = {"model": "policy", "messages": messages, "max_tokens": 2}
    assert httpx.post(f"{url}/sessions/{name}/v1/chat/completions", json=body, timeout=60).status_code == 200


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux changes the limits of another process")
@pytest.mark.slow
def test_what_a_full_disk_refuses_is_an_error_until_it_is_recorded(relay, tmp_path):
    """The limit of the size of files stands for the full disk: the system refuses the same call."""
    record = tmp_path / "chats.mmr"
    with serving(tmp_path, *relay, "--record", str(record)) as (url, process):
        begin(url, "kept")
        begin(url, "lost")
        begin(url, "never-ended")
        unlimited = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        full = (record.stat().st_size + 1000, unlimited[1])
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, full)
        for response in (httpx.post(f"{url}/sessions/kept/end"), httpx.delete(f"{url}/sessions/kept")):
            assert (response.status_code, response.json()["error"]["code"]) == (500, "session_not_delivered")
            assert "File too large" in response.json()["error"]["message"]
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)
        assert httpx.post(f"{url}/sessions/kept/end").status_code == 200
        assert httpx.delete(f"{url}/sessions/kept").status_code == 204
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (record.stat().st_size + 1000, unlimited[1]))
        assert httpx.post(f"{url}/sessions/lost/end").status_code == 500
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 2
    assert [one.episode_id for one in read_records(record)] == ["kept"]
    errors = (tmp_path / "stderr").read_text()
    assert f"{record}: lost, never-ended not recorded: OSError: [Errno 27] File too large" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.slow
def test_a_signal_ends_the_server_with_every_session_recorded(relay, tmp_path, number):
    record = tmp_path / "chats.mmr"
    with serving(tmp_path, *relay, "--record", str(record)) as (url, process):
        begin(url, "s")
        process.send_signal(number)
        assert process.wait(60) == 130
    assert [one.episode_id for one in read_records(record)] == ["s"]
    assert "Traceback" not in (tmp_path / "stderr").read_text()


@pytest.mark.slow
def test_interrupts_without_end_lose_no_session(relay, tmp_path):
    record = tmp_path / "chats.mmr"
    names = {f"s{number}" for number in range(30)}  # recording them takes longer than the time between two signals
    with serving(tmp_path, *relay, "--record", str(record)) as (url, process):
        with httpx.Client(base_url=url, timeout=60) as client:
            for name in names:
                assert client.post("/sessions", json={"session_id": name}).status_code == 201
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.002)
    assert {one.episode_id for one in read_records(record)} == names
