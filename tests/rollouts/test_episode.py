"""The multi-turn loop: what it sends to the engine, and on which thread it renders."""

import threading

import pytest
from hostile_server import answer, serving
from images import png
from misbehaviour import Talkative
from sub_agents import play

from renderers import MediaPolicy, RendererPool, load_renderer
from rollouts import StepResult
from rollouts.engines.http.prompt_checks import header_violations
from rollouts.testing import ScriptedEngine


def test_a_bridge_is_the_last_prompt_with_the_sampled_ids_and_only_new_tokens(renderer):
    engine = ScriptedEngine(["five", "six", "seven"], renderer=renderer)
    trajectory = play(Talkative(), engine, renderer)
    prompts = [list(request.prompt_ids) for request in engine.requests]
    for before, after, text in zip(prompts, prompts[1:], ("five", "six"), strict=False):
        said = [*renderer.tokenizer.encode_run(text).ids, *renderer.get_stop_token_ids()[:1]]
        assert after[: len(before) + len(said)] == [*before, *said]
    (leaf,) = trajectory.leaves()
    assert trajectory.token_ids(leaf).tolist()[: len(prompts[2])] == prompts[2]
    assert trajectory.forks == 0


@pytest.mark.parametrize("pooled", [False, True], ids=["a renderer", "a pool"])
def test_rendering_bridging_and_parsing_stay_off_the_event_loop(renderer, monkeypatch, pooled):
    threads = {}
    for method in ("render", "bridge_to_next_turn", "parse_response"):
        real = getattr(renderer, method)

        def noting(*args, _real=real, _method=method, **kwargs):
            threads.setdefault(_method, set()).add(threading.current_thread())
            return _real(*args, **kwargs)

        monkeypatch.setitem(vars(renderer), method, noting)
    engine = ScriptedEngine(["a", "b", "c"], renderer=renderer)
    trajectory = play(Talkative(), engine, RendererPool(renderer) if pooled else renderer)
    assert trajectory.done
    assert threads.keys() == {"render", "bridge_to_next_turn", "parse_response"}
    assert threading.main_thread() not in set().union(*threads.values())


def test_images_behind_urls_are_fetched_in_the_first_prompt_and_in_a_bridge(tiny_model_dir):
    policy = MediaPolicy(
        allowed_schemes=frozenset({"http"}), allowed_hosts=("127.0.0.1",), allowed_networks=("127.0.0.1/32",)
    )
    renderer = load_renderer(tiny_model_dir, media_policy=policy)

    class Gallery:
        def reset(self, seed):
            self.left = ["red", "blue"]
            return [self.show()]

        def step(self, assistant):
            return StepResult([self.show()]) if self.left else StepResult(done=True)

        def show(self):
            colour = self.left.pop(0)
            url = server.on(f"/{colour}.png", answer(png(colour)))
            return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}

    with serving() as server:
        trajectory = play(Gallery(), ScriptedEngine(["a", "b"], renderer=renderer), renderer)
    assert (trajectory.done, trajectory.forks) == (True, 0)
    assert len({reference.mm_hash for reference in trajectory.all_media()}) == 2


@pytest.mark.parametrize("name", ["digit 0/0", "Größe 3", "数" * 300, "a%20b", "x" * 500, "tab\t"])
def test_ids_of_requests_fit_into_http_headers_whatever_the_id_of_the_task_is(renderer, name):
    engine = ScriptedEngine(["five"] * 6, renderer=renderer)
    for each in (name, name.replace("%20", " ") + "0"):
        play(Talkative(), engine, renderer, episode_id=each)
    assert [header for request in engine.requests for header in header_violations(request)] == []
    assert len({request.request_id for request in engine.requests}) == 6
    assert len({request.session_id for request in engine.requests}) == 2
