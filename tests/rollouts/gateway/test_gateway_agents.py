"""Programs that were not written for this package, with nothing changed but their base URL."""

import json

import pytest
from gateway_server import served

from rollouts.testing import ScriptedEngine

LOOK = '<tool_call>\n{{"name": "look", "arguments": {{"row": {row}, "column": "{column}"}}}}\n</tool_call>'


def test_chunks_of_a_stream_joined_are_the_message(renderer):
    script = ["<think>\nhm\n</think>\n\nI look." + LOOK.format(row=1, column="left"), "Red."]
    engine = ScriptedEngine(script, renderer=renderer)
    with served(engine, renderer) as server:
        client = server.client("s")
        messages = [{"role": "user", "content": "Which?"}]
        stream = client.chat.completions.create(
            model="m",
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        chunks = list(stream)
        content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert content == "I look."
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas).strip() == "hm"
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        name = "".join(call.function.name or "" for call in calls)
        arguments = "".join(call.function.arguments or "" for call in calls)
        assert (name, json.loads(arguments)) == ("look", {"row": 1, "column": "left"})
        trajectory = server.trajectory("s")
        sampled = trajectory.nodes[1]
        token_ids = [i for chunk in chunks for c in chunk.choices for i in getattr(c, "token_ids", None) or ()]
        assert token_ids == sampled.token_ids.tolist()
        assert sum(len(c.logprobs.content) for chunk in chunks for c in chunk.choices if c.logprobs) == len(sampled)
        assert chunks[0].prompt_token_ids == trajectory.nodes[0].token_ids.tolist()
        assert chunks[-1].usage.completion_tokens == len(sampled)
        assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["tool_calls"]


def test_smolagents_runs_with_tool_choice_auto_and_each_of_its_rewrites_is_a_branch(renderer):
    """It sends tool calls back as text, which is not what the model wrote."""
    smolagents = pytest.importorskip("smolagents")

    class Look(smolagents.Tool):
        name = "look"
        description = "Look at a field."
        inputs = {"row": {"type": "integer", "description": "The row."}}  # noqa: RUF012  the framework's own form
        output_type = "string"

        def forward(self, row: int) -> str:
            return "red"

    final = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "red"}}\n</tool_call>'
    call = '<tool_call>\n{"name": "look", "arguments": {"row": 1}}\n</tool_call>'
    engine = ScriptedEngine([call, final], renderer=renderer)
    with served(engine, renderer) as server:
        model = smolagents.OpenAIModel(
            model_id="policy",
            api_base=server.base_url,
            api_key="none",
            tool_choice="auto",
            client_kwargs={"default_headers": {"X-Session-ID": "smol"}},
        )
        agent = smolagents.ToolCallingAgent(tools=[Look()], model=model, verbosity_level=0)
        assert agent.run("Which colour?") == "red"
        trajectory = server.trajectory("smol")
    assert trajectory.num_turns == 2
    assert len(trajectory.leaves()) == 2


@pytest.mark.slow
def test_an_agent_of_langchain_is_one_branch_with_its_tool_calls(renderer, monkeypatch):
    langchain_openai = pytest.importorskip("langchain_openai")
    messages = pytest.importorskip("langchain_core.messages")
    tools = pytest.importorskip("langchain_core.tools")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")

    @tools.tool
    def look(row: int, column: str) -> str:
        """Look at a field."""
        return "red" if column == "left" else "blue"

    two_calls = LOOK.format(row=1, column="left") + "\n" + LOOK.format(row=1, column="right")
    engine = ScriptedEngine([f"I look.{two_calls}", "Red and blue."], renderer=renderer)
    with served(engine, renderer) as server:
        model = langchain_openai.ChatOpenAI(
            model="policy",
            base_url=server.base_url,
            api_key="none",
            max_retries=0,
            default_headers={"X-Session-ID": "chain"},
        ).bind_tools([look])
        conversation = [messages.SystemMessage("You look."), messages.HumanMessage("Which colours?")]
        answer = model.invoke(conversation)
        while answer.tool_calls:
            conversation += [answer, *(look.invoke(call) for call in answer.tool_calls)]
            answer = model.invoke(conversation)
        trajectory = server.trajectory("chain")
    assert answer.content == "Red and blue."
    assert (trajectory.num_turns, len(trajectory.leaves()), trajectory.forks) == (2, 1, 0)
    roles = [message["role"] for message in trajectory.to_messages(trajectory.leaves()[0])]
    assert roles == ["system", "user", "assistant", "tool", "tool", "assistant"]
