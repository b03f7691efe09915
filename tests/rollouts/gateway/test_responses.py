"""Responses alone: which turn an id or the ids of items continue, what a session keeps for them, and their tools."""

from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from gateway_server import IMAGE, image_part, plain_tree, user
from starlette.applications import Starlette

from rollouts.errors import ArgumentError
from rollouts.serve.gateway import history
from rollouts.serve.gateway.limits import GatewayLimits
from rollouts.serve.gateway.routes import Gateway
from rollouts.testing import ScriptedEngine


class Client:
    """A client of the session s."""

    def __init__(self, gateway: Gateway, http: httpx.AsyncClient) -> None:
        self.gateway, self.http = gateway, http

    async def ask(self, input: Any, previous: Any = None, status: int = 200, **fields: Any) -> Any:
        body = {"input": input, "previous_response_id": previous and previous["id"], **fields}
        response = await self.http.post("/sessions/s/v1/responses", json=body)
        assert response.status_code == status, response.text
        return response.json()

    async def figures(self) -> Any:
        return (await self.http.get("/sessions/s")).json()

    async def delete(self, response: Any) -> None:
        assert (await self.http.delete(f"/v1/responses/{response['id']}")).status_code == 200

    def parents(self) -> list[int | None]:
        """The turn that each turn continues."""
        trajectory = self.gateway.trajectory("s")
        turns = {turn.node: number for number, turn in enumerate(trajectory.turns)}
        return [turns.get(trajectory.nodes[trajectory.nodes[turn.node].parent].parent) for turn in trajectory.turns]

    def roles(self) -> list[str]:
        """Of the messages of the last turn."""
        trajectory = self.gateway.trajectory("s")
        return [message["role"] for message in trajectory.to_messages(trajectory.turns[-1].node)]


@asynccontextmanager
async def client_of(renderer: Any, script: Any = None, **options: Any) -> Any:
    gateway = Gateway(ScriptedEngine(script or (lambda request: "Red."), renderer=renderer), renderer, **options)
    transport = httpx.ASGITransport(Starlette(routes=gateway.routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield Client(gateway, http)
    await gateway.close()


async def test_the_id_of_a_response_continues_its_own_turn_among_equal_ones(renderer):
    async with client_of(renderer) as client:
        first, second = [await client.ask("Which?") for _ in range(2)]
        third = await client.ask("And now?", first)
        fourth = await client.ask("And now?", second)
        for previous in (first, third, fourth):
            await client.ask("And then?", previous)
        # An item of a later turn: of the equal turns it continues the one after the response that is named.
        await client.ask([*user_items("And now?"), *third["output"], *user_items("Else?")], first)
        assert client.parents() == [None, None, 0, 1, 0, 2, 3, 2]


def user_items(*texts: str) -> list[Any]:
    return [user(text) for text in texts]


async def test_other_instructions_after_a_response_are_a_branch_as_of_a_client_that_sends_all_items(renderer):
    call = '\n<tool_call>\n{"name": "look", "arguments": {"row": 1}}\n</tool_call>'
    image = {"type": "input_image", "image_url": image_part(IMAGE)["image_url"]["url"]}
    asked = {"role": "user", "content": [{"type": "input_text", "text": "Which?"}, image]}
    trees = []
    for by_id in (True, False):
        async with client_of(renderer, [f"<think>\nhm\n</think>\n\nI look.{call}{call}", "Red.", "Blue."]) as client:
            first = await client.ask([asked], instructions="Look.")
            calls = [item for item in first["output"] if item["type"] == "function_call"]
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": f"result {number}"}
                for number, item in enumerate(calls)
            ]
            items = [asked, *first["output"], *results]
            sent = (results, first) if by_id else (items,)
            second = await client.ask(*sent, instructions="Look twice.")
            await client.ask([*items, *second["output"], user("And now?")], instructions="Look twice.")
            reason = "forks/the first other message has the role system"
            assert (await client.figures())["metrics"] == {reason: 1}
            nodes, turns, forks = plain_tree(client.gateway.trajectory("s"))
            trees.append(([node[:-1] for node in nodes], turns, forks))  # arguments of messages are text or objects
    assert trees[0] == trees[1]


async def test_completions_in_a_row_are_two_messages_where_the_ids_of_their_items_say_so(renderer):
    script = ["<think>\nhm\n</think>\n\nRed.", "<think>\nso\n</think>\n\nBlue.", "Green.", "Grey."]
    async with client_of(renderer, script) as client:
        first = await client.ask("Which?")
        second = await client.ask([], first)
        items = [user("Which?"), *first["output"], *second["output"], user("And now?")]
        await client.ask(items)
        figures = await client.figures()
        assert (figures["turns"], figures["branches"], figures["forks"]) == (3, 1, 0)
        await client.ask([{**item, "id": f"foreign_{number}"} for number, item in enumerate(items)])
        assert client.roles() == ["user", "assistant", "user", "assistant"]


async def test_reasoning_without_a_text_is_no_message(renderer):
    async with client_of(renderer) as client:
        reasoning = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
        await client.ask([user("a"), reasoning, user("b")])
        assert client.roles() == ["user", "user", "assistant"]
        assert "no items with a content" in (await client.ask([reasoning], status=400))["error"]["message"]


async def test_a_continuation_reads_what_is_new_alone(renderer, monkeypatch):
    counted: list[int] = []
    digest = history._digest
    monkeypatch.setattr(history, "_digest", lambda text: counted.append(len(text)) or digest(text))
    async with client_of(renderer) as client:
        response, counts = None, []
        for _ in range(6):
            counted.clear()
            response = await client.ask("a", response, instructions="Look.")
            counts.append(len(counted))
    assert counts[1:] == [counts[1]] * 5


async def test_all_messages_of_a_chain_of_responses_count_for_the_limit_of_parts(renderer):
    async with client_of(renderer, limits=GatewayLimits(max_parts=8)) as client:
        response = None
        for _ in range(4):
            response = await client.ask("a", response)
        refused = (await client.ask("a", response, status=400))["error"]
        assert (refused["param"], "at most 8" in refused["message"]) == ("input", True)


@pytest.mark.parametrize("by_id", [False, True])
async def test_responses_share_their_conversation_with_the_trajectory_and_deleted_ones_keep_nothing(renderer, by_id):
    sizes = {}
    for store in (True, False):
        async with client_of(renderer) as client:
            talk: list[Any] = [user("a" * 100_000)]
            responses: list[Any] = [await client.ask(talk, store=store)]
            for turn in range(2):
                talk += [*responses[-1]["output"], user(str(turn))]
                named = (talk[-1:], responses[-1]) if by_id and store else (talk,)
                responses.append(await client.ask(*named, store=store))
            sizes[store] = [(await client.figures())["estimated_bytes"]]
            for response in responses if store else ():
                await client.delete(response)
                sizes[store].append((await client.figures())["estimated_bytes"])
            statuses = [(await client.http.get(f"/v1/responses/{one['id']}")).status_code for one in responses]
            assert statuses == [404] * 3
    assert sizes[False][0] == sizes[True][-1] < sizes[True][0] < sizes[False][0] + 30_000


async def test_functions_of_a_namespace_are_tools_and_tools_that_the_server_ignores_are_counted(renderer):
    call = '<tool_call>\n{"name": "crm__look", "arguments": {"row": 1}}\n</tool_call>'
    function = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "crm", "description": "d", "tools": [function]}]
    async with client_of(renderer, [call, "Red."]) as client:
        refused = (await client.ask("a", tools=tools, status=400))["error"]
        assert (refused["param"], "--ignore-tool" in refused["message"]) == ("tools[0].type", True)
    async with client_of(renderer, [call, "Red."], ignored_tools=["web_search"]) as client:
        first = await client.ask("a", tools=tools)
        (item,) = first["output"]
        assert (item["namespace"], item["name"]) == ("crm", "look")
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "red"}
        await client.ask([user("a"), item, output], tools=tools)
        figures = await client.figures()
    assert (figures["turns"], figures["forks"], figures["metrics"]) == (2, 0, {"ignored_tools/web_search": 2})


def test_tools_that_clients_run_cannot_be_left_out(renderer):
    with pytest.raises(ArgumentError, match="clients run these tools themselves"):
        Gateway(ScriptedEngine(["Red."], renderer=renderer), renderer, ignored_tools=["function"])
