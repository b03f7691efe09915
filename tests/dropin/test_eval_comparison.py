"""The comparison of evaluations finds what it must find, and its server answers the prompts of the tasks alone."""

from __future__ import annotations

import dataclasses

import aiohttp
import pytest
from eval_comparison import Server, Side, completion, rows, table, violations

THEIRS = Side("theirs", 0.625, 0.5, 8, 2.0, 3.0, 2.5)
OURS = dataclasses.replace(THEIRS, name="ours", seconds=1.0)


def test_equal_results_are_no_violation_whatever_the_speed():
    assert violations([THEIRS, OURS], 8) == []
    assert "8    2.0x" in table("title", [THEIRS, OURS])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"mean_reward": 0.6250000000000001}, "ours: mean_reward 0.6250000000000001, with verifiers 0.625"),
        ({"pass_at_1": 0.25}, "ours: pass_at_1 0.25, with verifiers 0.5"),
        ({"episodes": 7}, "ours: 7 episodes, not 8"),
    ],
)
def test_each_violation_is_found(change, found):
    assert violations([THEIRS, dataclasses.replace(OURS, **change)], 8) == [found]


def test_the_answers_to_a_task_are_of_all_kinds_and_the_same_every_time():
    given = [completion(str(answer), number) for answer in range(1, 100) for number in range(4)]
    right = sum(text.split()[2] not in ("perhaps", "0") for text in given)
    guesses = sum("perhaps" in text for text in given)
    assert min(right, guesses, len(given) - right - guesses) > len(given) / 10
    assert given[:4] == [completion("1", number) for number in range(4)]


@pytest.mark.parametrize("with_images", [False, True])
async def test_the_server_knows_a_prompt_by_its_text_and_its_image(with_images):
    tasks = rows(2, with_images=with_images)
    async with Server(tasks) as server, aiohttp.ClientSession() as session:

        async def ask(messages):
            body = {"model": "m", "messages": messages}
            async with session.post(f"{server.url}/chat/completions", json=body) as response:
                return (await response.json()).get("choices")

        texts = [(await ask(tasks[1]["messages"]))[0]["message"]["content"] for _ in range(3)]
        assert texts == [completion("2", number) for number in range(3)]
        assert (server.requests, server.unknown) == (3, 0)
        content = tasks[0]["messages"][0]["content"]
        other = [content[0], tasks[1]["messages"][0]["content"][1]] if with_images else content + " "
        assert await ask([{"role": "user", "content": other}]) is None
        assert (server.requests, server.unknown) == (3, 1)
