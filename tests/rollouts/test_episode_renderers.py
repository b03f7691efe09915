"""Which renderers an episode takes, and on which thread they work."""

import asyncio
import io
import threading

import corpus
import numpy as np
import pytest
from hostile_server import answer, serving
from misbehaviour import Talkative
from PIL import Image

from renderers import MediaPolicy, RendererPool, load_renderer
from rollouts import Provenance, SamplingParams, StepResult, run_episode
from rollouts.testing import ScriptedEngine


def play(environment, engine, renderer, **options):
    options = {"sampling": SamplingParams(), "max_turns": 4, **options}
    return asyncio.run(run_episode(environment, engine=engine, renderer=renderer, **options))


def ids_of(trajectory):
    return [node.token_ids.tolist() for node in trajectory.nodes]


@pytest.mark.parametrize("pooled", [False, True], ids=["a renderer", "a pool"])
def test_rendering_bridging_and_parsing_stay_off_the_event_loop(renderer, monkeypatch, pooled):
    threads = {}
    for method in ("render", "bridge_to_next_turn", "parse_response"):
        real = getattr(renderer, method)

        def noting(*args, _real=real, _method=method, **kwargs):
            threads.setdefault(_method, set()).add(threading.current_thread())
            return _real(*args, **kwargs)

        monkeypatch.setitem(vars(renderer), method, noting)
    given = RendererPool(renderer) if pooled else renderer
    trajectory = play(Talkative(), ScriptedEngine(["a", "b", "c"], renderer=renderer), given)
    assert trajectory.done
    assert threads.keys() == {"render", "bridge_to_next_turn", "parse_response"}
    assert threading.main_thread() not in set().union(*threads.values())


@pytest.fixture
def images():
    """A server, and the URLs of two images on it."""
    with serving() as server:
        urls = []
        for shade in (60, 200):
            buffer = io.BytesIO()
            Image.fromarray(np.full((32, 32, 3), shade, np.uint8)).save(buffer, "PNG")
            urls.append(server.on(f"/{shade}.png", answer(buffer.getvalue())))
        yield urls


@pytest.mark.parametrize("pooled", [False, True], ids=["a renderer", "a pool"])
def test_images_behind_urls_are_fetched_in_the_first_prompt_and_in_a_bridge(tiny_model_dir, images, pooled):
    policy = MediaPolicy(
        allowed_schemes=frozenset({"http"}), allowed_hosts=("127.0.0.1",), allowed_networks=("127.0.0.1/32",)
    )
    renderer = load_renderer(tiny_model_dir, media_policy=policy)

    class Gallery:
        def reset(self, seed):
            self.left = list(images)
            return [self.show()]

        def step(self, assistant):
            return StepResult([self.show()]) if self.left else StepResult(done=True)

        def show(self):
            return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": self.left.pop(0)}}]}

    given = RendererPool(renderer) if pooled else renderer
    trajectory = play(Gallery(), ScriptedEngine(["grey", "grey"], renderer=renderer), given)
    assert trajectory.done
    assert trajectory.forks == 0
    assert len({reference.mm_hash for reference in trajectory.all_media()}) == 2


def test_the_provenance_of_a_pool_is_that_of_its_renderer(renderer):
    with RendererPool(renderer) as pool:
        told = Provenance.of(pool, None)
    assert told == Provenance.of(renderer, None)
    assert told.model
    assert told.template
    assert told.processors
    played = play(Talkative(), ScriptedEngine(["a", "b", "c"], renderer=renderer), RendererPool(renderer))
    assert played.provenance.processors == told.processors


class TextOnly:
    """A renderer of text as its protocol demands it: no parameter for media, no map of placeholder tokens."""

    def __init__(self, renderer):
        self._renderer = renderer

    def render(self, messages, *, tools=None, add_generation_prompt=False):
        return self._renderer.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def render_ids(self, messages, *, tools=None, add_generation_prompt=False):
        return self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids

    def parse_response(self, token_ids, *, tools=None, prompt_ids=None):
        return self._renderer.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)

    def get_stop_token_ids(self):
        return self._renderer.get_stop_token_ids()

    def bridge_to_next_turn(
        self, previous_prompt_ids, previous_completion_ids, new_messages, *, tools=None, previous_messages=None
    ):
        return self._renderer.bridge_to_next_turn(
            previous_prompt_ids, previous_completion_ids, new_messages, tools=tools, previous_messages=previous_messages
        )


MODELS = ("qwen-2.5", "qwen-3", "glm-4.7-flash", "deepseek-v3")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "wrap", [lambda r: r, TextOnly, lambda r: RendererPool(TextOnly(r))], ids=["own", "text", "pool"]
)
def test_real_text_models_are_played_over_several_turns(model, wrap):
    renderer = load_renderer(corpus.model_dir(model))
    trajectory = play(Talkative(), ScriptedEngine(["one", "two", "three"], renderer=renderer), wrap(renderer))
    assert (trajectory.num_turns, trajectory.done) == (3, True)
    # Where the prompt opens reasoning, what is said is reasoning.
    said = [turn.message["content"] or turn.message["reasoning_content"] for turn in trajectory.turns]
    assert said == ["one", "two", "three"]


def test_a_renderer_of_text_makes_the_prompts_of_the_one_that_it_stands_for(renderer):
    plain, text = (
        play(Talkative(), ScriptedEngine(["a", "b", "c"], renderer=renderer), given)
        for given in (renderer, TextOnly(renderer))
    )
    assert ids_of(plain) == ids_of(text)
    assert plain.forks == 0
