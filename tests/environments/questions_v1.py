"""A taskset of verifiers: the rows of a file, with `messages` and `answer`. Its harness runs in this process.

It sends one chat completion, over connections that all episodes share: the least that verifiers' own loop takes.
"""

import functools
import json
from pathlib import Path

import verifiers.v1 as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult


class QuestionsHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = False
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=_http_client())
        await client.chat.completions.create(model=ctx.model, messages=[message_to_wire(one) for one in prompt])
        return ProgramResult(0, "", "")


@functools.cache
def _http_client() -> DefaultAsyncHttpxClient:
    return DefaultAsyncHttpxClient(timeout=600)


class QuestionsData(vf.TaskData):
    answer: str


class QuestionsTask(vf.Task[QuestionsData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        text = trace.assistant_messages[-1].content or ""
        return 1.0 if self.data.answer in text.split() else 0.25 if "perhaps" in text else 0.0


class QuestionsConfig(vf.TasksetConfig):
    path: str = ""


class QuestionsTaskset(vf.Taskset[QuestionsTask, QuestionsConfig]):
    def load(self):
        for line in Path(self.config.path).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            yield QuestionsTask(QuestionsData(prompt=row["messages"], answer=row["answer"]))


__all__ = ["QuestionsHarness", "QuestionsTaskset"]
