"""Chat completions of a real `rollouts serve`: trained on, their log-probabilities are those of the model."""

from __future__ import annotations

import signal
import subprocess
import sys

import httpx
import openai
import pytest
import torch
from gateway_server import IMAGE, OTHER_IMAGE, TOOLS, image_part
from transformers import AutoModelForImageTextToText

from renderers import load_renderer
from rollouts.training import TrainingBatch, mismatch_report, samples_from_trajectory, token_logprobs
from transport import read_records

KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def command(tiny_model_dir, tmp_path_factory):
    """The address of the server, its process, and the record file that it writes."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "key").write_text(KEY)
    arguments = ["--model", str(tiny_model_dir), "--name", "policy", "--port", "0"]
    arguments += ["--api-key-file", str(folder / "key"), "--record", str(folder / "chats.mmr")]
    main = "from rollouts.cli.main import main; main()"
    process = subprocess.Popen([sys.executable, "-c", main, "serve", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert "serving policy" in line
        yield next(word for word in line.split() if word.startswith("http://")), process, folder / "chats.mmr"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_request_without_the_key_is_unauthorized(command):
    url, _, _ = command
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="other", max_retries=0).models.list()
    assert httpx.get(f"{url}/sessions").status_code == 401


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
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130  # interrupted

    (trajectory,) = read_records(record)
    assert (trajectory.num_turns, trajectory.reward, len(trajectory.leaves())) == (5, 1.0, 2)
    renderer = load_renderer(tiny_model_dir)
    samples = samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    model = AutoModelForImageTextToText.from_pretrained(tiny_model_dir, dtype=torch.float32)
    with torch.no_grad():
        report = mismatch_report(batch, token_logprobs(model, batch))
    assert report.tokens == sum(len(trajectory.nodes[turn.node]) for turn in trajectory.turns)
    assert report.max_abs < 1e-4
