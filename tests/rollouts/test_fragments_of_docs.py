"""Pages whose code needs a repository of the Hub or a server: the tests give it a small model and a scripted server."""

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
from transformers import AutoTokenizer

import renderers
from renderers import load_renderer
from rollouts import VLLMEngine
from rollouts.engines.vllm import write_tied_head
from rollouts.serve.gateway.routes import Gateway
from rollouts.testing import CHAT_TEMPLATE, ScriptedEngine, tiny_qwen3_vl
from rollouts.tinker.model_app import model_app
from transport import RecordReader, RecordWriter

pytestmark = pytest.mark.usefixtures("empty_working_directory")


@pytest.fixture
def repositories(tiny_model_dir, monkeypatch):
    """Every repository of the Hub is the tiny model."""

    def load(name_or_dir, **options):
        return load_renderer(tiny_model_dir if str(name_or_dir).startswith("Qwen/") else name_or_dir, **options)

    monkeypatch.setattr(renderers, "load_renderer", load)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: tokenizer)


@pytest.mark.slow
def test_the_page_on_rendering(repositories, tmp_path):
    (tmp_path / "my.jinja").write_text(CHAT_TEMPLATE, "utf-8")
    names = run_page("rendering.md")
    exact = [*names["prompt_ids"], *names["completion_ids"]]
    assert names["prompt"].token_ids[: len(exact)] == exact
    assert (names["parsed"].content, names["parsed"].stopped) == ("Left.", True)


def test_the_page_on_media(repositories):
    names = run_page("media.md")
    assert names["placeholder"].length == 8
    assert names["item"]["pixel_values"].dtype == np.uint8


def test_the_page_on_supervised_samples(repositories):
    names = run_page("training-samples.md")
    trained = np.array(names["sample"].token_ids)[names["sample"].loss_mask].tolist()
    assert names["renderer"].tokenizer.decode(trained) == "This.<|im_end|>"


def test_the_page_on_transport():
    names = run_page("transport.md")
    assert names["shortened"] != names["steps"]


async def run_with_await(page, text):
    """Runs the blocks of a page that await at the top level, and returns its global names."""
    names = {}
    for number, block in enumerate(BLOCK.findall(text)):
        code = compile(block, f"{page}, block {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if (running := eval(code, names)) is not None:
            await running
    return names


@pytest.mark.slow
async def test_the_page_on_vllm(tiny_model_dir, repositories, tmp_path):
    checkpoint = shutil.copytree(tiny_model_dir, tmp_path / "step-7")
    write_tied_head(checkpoint)
    async with EngineVLLM(tiny_model_dir) as server:
        url = server.base_url
        text = (DOCS / "vllm.md").read_text("utf-8")
        text = text.replace("http://127.0.0.1:8000", url).replace("/checkpoints/step-7", str(checkpoint))
        text = re.sub(r"max_tokens=\d+", "max_tokens=8", text)
        names = await run_with_await("vllm.md", text)
        assert (names["trajectory"].num_turns, names["trajectory"].error) == (1, "")
        ids = load_renderer(tiny_model_dir).render_ids(names["messages"], add_generation_prompt=True)
        assert names["prompt"].token_ids == ids
        async with VLLMEngine(url) as engine:
            assert await engine.served_version() == "step-7"


@pytest.mark.slow
async def test_the_page_on_chat_endpoints(renderer):
    engine = ScriptedEngine(["black", "red"], renderer=renderer)
    with ServedInThread(Starlette(routes=Gateway(engine, renderer).routes())) as server:
        text = (DOCS / "chat-endpoints.md").read_text("utf-8").replace("http://127.0.0.1:8000", server.base_url)
        names = await run_with_await("chat-endpoints.md", text)
    answer = names["answer"]
    assert (answer.message["content"], answer.finish_reason) == ("red", "stop")
    first, second = engine.requests
    assert (len(first.media), first.sampling.seed is None) == (1, False)
    assert answer.tokens.prompt_ids.tolist() == list(second.prompt_ids)


@pytest.mark.slow
def test_the_page_on_distillation():
    names = run_page("distillation.md")
    (sample,) = names["samples"]
    assert sample.teacher_top_ids.shape == (len(sample), 8)
    for name in ("reverse", "forward", "between"):  # the teacher is the student
        assert abs(names[name].item()) < 1e-4
    with RecordWriter("episodes.mmr") as out:
        out.append([names["trajectory"]])
    asyncio.run(names["scored_file"]("episodes.mmr", "scored.mmr", names["renderer"]))
    with RecordReader("scored.mmr") as reader:
        assert abs(reader[0].metrics["teacher_kl"]) < 1e-4


@pytest.mark.slow
def test_the_page_on_the_tinker_api(tmp_path, capsys):
    name = "Qwen/Qwen3-VL-30B-A3B-Instruct"
    app = model_app(tiny_qwen3_vl(name), tmp_path / "run", names=[name], device="cpu")
    (block,) = BLOCK.findall((DOCS / "tinker.md").read_text("utf-8"))
    with ServedInThread(app) as server:
        exec(block.replace("http://127.0.0.1:8000", server.base_url), {})
    losses, sampled = capsys.readouterr().out.splitlines()
    first, last = map(float, losses.split(" -> "))
    assert last < 0.1 < first
    assert sampled == "4<|im_end|>"
