"""Teachers on servers: what they cannot give is found before the run, and one that dies is waited for."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from engine_inputs import FAST_RETRIES, write_adapter
from fake_http import Response, error_response
from fake_server import FakeVLLM
from run_config_files import FOURS, write_run
from runner_world import Counting, make_runner, tasks

from rollouts import VLLMEngine
from rollouts.run_config.config_file import read_config
from rollouts.run_config.engines import connect
from rollouts.run_config.errors import RunConfigError
from rollouts.run_config.run_parts import make_parts
from rollouts.runner import RetryPolicy
from rollouts.runner.events import EpisodeWaiting
from rollouts.training import score, with_scores

TEACHER = """
[teacher]
engine = { kind = "vllm", base_url = "URL" }
renderer = { model = "model" }
"""


class TeacherVLLM(FakeVLLM):
    """Its --max-logprobs is 20, and each adapter lowers the log-probabilities of a prompt by the length of its name."""

    def refusal(self, body):
        asked = (body.get("sampling_params") or {}).get("prompt_logprobs") or 0
        if asked > 20:
            text = f"Requested prompt logprobs of {asked}, which is greater than max allowed: 20"
            return error_response(400, text, "BadRequestError")
        return super().refusal(body)

    def generated(self, seen, *, cut=None) -> Response:
        response = super().generated(seen, cut=cut)
        content, name = json.loads(response.body), seen.json["model"]
        if content["prompt_logprobs"] and name in self.adapters:
            for entry in content["prompt_logprobs"][1:]:
                for said in entry.values():
                    said["logprob"] -= len(name)
            response.body = json.dumps(content).encode()
        return response


@pytest.fixture
async def server():
    async with TeacherVLLM(lora=True) as server:
        yield server


async def check(directory: Path, server: TeacherVLLM, keys: str) -> None:
    """The check of a teacher at the start of a run."""
    file = read_config(write_run(directory, FOURS + TEACHER.replace("URL", server.base_url) + keys))
    teacher = make_parts(file, offline=True).teacher
    engine = teacher.make_engine()
    try:
        await connect(teacher.file, engine)
        await teacher.check(engine, None)
    finally:
        await engine.close()


async def problem_of(directory: Path, server: TeacherVLLM, keys: str) -> tuple[str, str]:
    with pytest.raises(RunConfigError) as caught:
        await check(directory, server, keys)
    (problem,) = caught.value.problems
    return problem.key, problem.reason


async def test_more_likeliest_tokens_than_the_server_gives_are_refused_before_the_run(server, tmp_path):
    key, reason = await problem_of(tmp_path, server, "top_k = 21")
    assert key == "teacher.top_k"
    assert "or start the server with a larger --max-logprobs): HTTP 400" in reason
    assert "Requested prompt logprobs of 21, which is greater than max allowed: 20" in reason
    assert reason.endswith("21 is too large: use a smaller one")


async def test_an_adapter_that_the_server_does_not_have_is_refused_before_the_run(server, tmp_path):
    server.adapters["judge"] = str(write_adapter(tmp_path / "judge"))
    await check(tmp_path, server, 'adapter = "judge"')
    assert [seen.json["model"] for seen in server.generations if "model" in seen.json] == [server.model, "judge"]
    key, reason = await problem_of(tmp_path, server, 'adapter = "other"')
    assert key == "teacher.adapter"
    assert "the adapter 'other' is not loaded (loaded: 'judge')" in reason
    assert "--lora-modules NAME=DIRECTORY" in reason


async def test_a_teacher_that_dies_and_comes_back_with_other_weights_scores_every_episode(server, renderer):
    """It dies while it has the first episode, and is started again when the runner waits for it."""
    made, scored_by = [], []
    engine = VLLMEngine(server.base_url, limits=replace(FAST_RETRIES, retries=0))

    def make(task):
        made.append(task.task_id)
        return Counting(task)

    async def scored(episode):
        if not scored_by:
            scored_by.append("")
            await server.stop()
        return with_scores(episode, await score(episode, engine))

    def restart(event):
        if isinstance(event, EpisodeWaiting) and event.waiting_for == "retry" and server._server is None:
            server.weight_version = "new"
            starting.append(asyncio.ensure_future(server.start()))

    starting = []
    options = {"retry": RetryPolicy(first_delay=0.0), "listeners": [restart], "concurrency": 1}
    async with engine, make_runner(renderer, make, score_episode=scored, **options) as runner:
        episodes = [group.episodes[0] async for group in runner.stream(tasks(2))]
    assert made == ["t0", "t1"]
    for episode in episodes:
        assert not episode.error
        assert tuple(episode.provenance.teacher_versions) == ("new",)
        assert all("teacher_logprobs" in node.extras for node in episode.nodes)
