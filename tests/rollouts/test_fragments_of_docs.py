"""Pages whose code begins in the middle of a program: the tests give them their names, a small model for a repository
of the Hub, and a scripted server for a vLLM server."""

import ast
import asyncio
import re
import shutil

import numpy as np
import pytest
from engine_server import EngineVLLM
from served_in_thread import ServedInThread
from starlette.applications import Starlette
from test_docs_pages import BLOCK, DOCS, run_page

import renderers
from renderers import load_renderer
from rollouts import LocalEngine, SamplingParams, StepResult, VLLMEngine, run_episode
from rollouts.engines.vllm import write_tied_head
from rollouts.models.loading import load_model
from rollouts.serve.gateway.routes import Gateway
from rollouts.testing import CHAT_TEMPLATE, ScriptedEngine
from rollouts.training import samples_from_trajectory
from transport import RecordReader, RecordWriter

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
QUESTION = [{"role": "user", "content": "Which?"}]
CONVERSATION = [*QUESTION, {"role": "assistant", "content": "This."}]


class Asks:
    """Two turns, the first with an image."""

    def reset(self, seed):
        self.turns = 0
        square = np.full((32, 32, 3), 90, np.uint8)
        return [{"role": "user", "content": [{"type": "image", "image": square}, {"type": "text", "text": "Which?"}]}]

    def step(self, assistant):
        self.turns += 1
        return StepResult([{"role": "user", "content": "Sure?"}], reward=0.5, done=self.turns == 2)


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def repositories(tiny_model_dir, monkeypatch):
    """Every repository of the Hub is the tiny model."""

    def load(name_or_dir, **options):
        return load_renderer(tiny_model_dir if str(name_or_dir).startswith("Qwen/") else name_or_dir, **options)

    monkeypatch.setattr(renderers, "load_renderer", load)


@pytest.mark.slow
def test_the_page_on_rendering(tiny_model_dir, repositories, tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "my.jinja").write_text(CHAT_TEMPLATE, "utf-8")
    renderer = load_renderer(tiny_model_dir)
    prompt_ids = renderer.render_ids(QUESTION, tools=TOOLS, add_generation_prompt=True)
    completion_ids = [*renderer.tokenizer.encode_scaffold("This."), renderer.get_stop_token_ids()[0]]
    names = run_page(
        "rendering.md",
        directory=tiny_model_dir,
        tokenizer=AutoTokenizer.from_pretrained(tiny_model_dir),
        messages=QUESTION,
        tools=TOOLS,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        new_messages=[{"role": "user", "content": "Sure?"}],
        stream=[[token] for token in completion_ids],
    )
    assert names["rendered"].token_ids == prompt_ids
    assert names["prompt"].token_ids[: len(prompt_ids) + len(completion_ids)] == prompt_ids + completion_ids
    assert (names["parsed"].content, names["parsed"].stopped) == ("This.", True)
    own = names["read"]
    assert (own.reasoning_content, own.content, [call.name for call in own.tool_calls]) == ("Left?", "Now.", ["look"])
    assert own.tool_calls[0].status == "ok"


def test_the_page_on_media(tiny_model_dir, repositories):
    names = run_page("media.md", directory=tiny_model_dir, image=np.zeros((32, 64, 3), np.uint8))
    assert names["placeholder"].length == 8
    assert names["item"]["pixel_values"].dtype == np.uint8
    (thumbnail,) = names["rendered"].multi_modal_data.mm_items["image"]
    assert thumbnail["pixel_values"].shape == (1, 32, 32, 3)
    assert names["rendered"].multi_modal_data.mm_placeholders["image"][0].length == 4


def test_the_page_on_supervised_samples(repositories):
    names = run_page("training-samples.md", messages=CONVERSATION, tools=None)
    trained = np.array(names["sample"].token_ids)[names["sample"].loss_mask].tolist()
    assert names["renderer"].tokenizer.decode(trained) == "This.<|im_end|>"


def test_the_page_on_transport(renderer):
    engine = ScriptedEngine(lambda request: "This.", renderer=renderer)
    episode = run_episode(Asks(), engine=engine, renderer=renderer, sampling=SamplingParams(), max_turns=2)
    names = run_page("transport.md", trajectory=asyncio.run(episode))
    assert names["shortened"] != names["steps"]


async def run_with_await(page, text, names):
    """Runs the blocks of a page that await at the top level, with the names `names`, to which theirs are added."""
    for number, block in enumerate(BLOCK.findall(text)):
        code = compile(block, f"{page}, block {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if (running := eval(code, names)) is not None:
            await running


@pytest.mark.slow
async def test_the_page_on_vllm(tiny_model_dir, tmp_path):
    checkpoint = shutil.copytree(tiny_model_dir, tmp_path / "step-7")
    write_tied_head(checkpoint)
    async with EngineVLLM(tiny_model_dir) as server:
        url = server.base_url
        text = (DOCS / "vllm.md").read_text("utf-8")
        text = text.replace("http://127.0.0.1:8000", url).replace("/checkpoints/step-7", str(checkpoint))
        text = re.sub(r"max_tokens=\d+", "max_tokens=8", text)
        ids = load_renderer(tiny_model_dir).render_ids(QUESTION)
        image = np.zeros((256, 256, 3), np.uint8)
        names = {"environment": Asks(), "model_dir": tiny_model_dir, "messages": QUESTION, "image": image}
        names |= {"ids": ids, "more_ids": ids}
        await run_with_await("vllm.md", text, names)
        assert (names["trajectory"].num_turns, names["trajectory"].error) == (2, "")
        assert len(names["prompt"].token_ids) == 2 * len(ids) + 256
        async with VLLMEngine(url) as engine:
            assert await engine.control.weight_version() == "step-7"


@pytest.mark.slow
async def test_the_page_on_chat_endpoints(renderer):
    engine = ScriptedEngine(["black", "red"], renderer=renderer)
    with ServedInThread(Starlette(routes=Gateway(engine, renderer).routes())) as server:
        text = (DOCS / "chat-endpoints.md").read_text("utf-8").replace("http://127.0.0.1:8000", server.base_url)
        names = {}
        await run_with_await("chat-endpoints.md", text, names)
    answer = names["answer"]
    assert (answer.message["content"], answer.finish_reason) == ("red", "stop")
    first, second = engine.requests
    assert (len(first.media), first.sampling.seed is None) == (1, False)
    assert answer.tokens.prompt_ids.tolist() == list(second.prompt_ids)


@pytest.mark.slow
def test_the_page_on_distillation(tiny_model_dir):
    engine, renderer = LocalEngine.from_pretrained(tiny_model_dir), load_renderer(tiny_model_dir)
    options = {"engine": engine, "renderer": renderer, "sampling": SamplingParams(max_tokens=4, seed=0)}
    trajectory = asyncio.run(run_episode(Asks(), max_turns=2, **options))
    samples = samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)
    names = run_page(
        "distillation.md",
        samples=samples,
        renderer=renderer,
        teacher_directory=tiny_model_dir,
        model=load_model(tiny_model_dir).train(),
    )
    assert names["samples"][0].teacher_top_ids.shape == (len(samples[0]), 8)
    for name in ("reverse", "forward", "between"):  # the teacher is the student
        assert abs(names[name].item()) < 1e-4
    with RecordWriter("episodes.mmr") as out:
        out.append([trajectory])
    asyncio.run(names["scored_file"]("episodes.mmr", "scored.mmr", renderer))
    with RecordReader("scored.mmr") as reader:
        assert abs(reader[0].metrics["teacher_kl"]) < 1e-4
