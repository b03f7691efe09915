"""The task of `benchmarks/runner_and_verifiers.py` for verifiers.

Its harness runs in this process and sends one chat completion a turn, over connections that all episodes share. That is
the least that verifiers' own loop takes: the harnesses that it comes with start a program for each episode.
"""

import functools

import verifiers.v1 as vf
from conversation import user_text
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.v1.runtimes import ProgramResult


class ConversationHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = False
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages: list[dict] = []
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=_http_client())
        for turn in range(data.turns):
            messages.append({"role": "user", "content": user_text(data.episode, turn)})
            completion = await client.chat.completions.create(model=ctx.model, messages=messages)
            messages.append({"role": "assistant", "content": completion.choices[0].message.content})
        return ProgramResult(0, "", "")


@functools.cache
def _http_client() -> DefaultAsyncHttpxClient:
    """One for all episodes: making one takes as long as several turns."""
    return DefaultAsyncHttpxClient(timeout=600)


class ConversationData(vf.TaskData):
    episode: int
    turns: int


class ConversationTask(vf.Task[ConversationData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def answered(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages) == self.data.turns)


class ConversationConfig(vf.TasksetConfig):
    episodes: int = 1
    turns: int = 1


class ConversationTaskset(vf.Taskset[ConversationTask, ConversationConfig]):
    def load(self):
        for episode in range(self.config.episodes):
            yield ConversationTask(
                ConversationData(prompt=user_text(episode, 0), episode=episode, turns=self.config.turns)
            )


__all__ = ["ConversationHarness", "ConversationTaskset"]
