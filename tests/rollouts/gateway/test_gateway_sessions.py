"""Sessions: by header, by path or by conversation; parallel requests, rewards, ends, limits and eviction."""

import asyncio
import json
import time
from contextlib import suppress
from types import SimpleNamespace

import httpx
import openai
import pytest
from gateway_server import CALL, TOOLS, served, user
from starlette.applications import Starlette

from rollouts.serve.errors import RequestError, SessionNotDeliveredError
from rollouts.serve.gateway import session, session_store
from rollouts.serve.gateway.limits import GatewayLimits
from rollouts.serve.gateway.routes import Gateway
from rollouts.testing import ScriptedEngine
from transport import read_records


def echo(renderer):
    """An engine that answers with the number of the request."""
    numbers = iter(range(10_000))
    return ScriptedEngine(lambda request: str(next(numbers)), renderer=renderer)


def ask(client, *texts, answers=()):
    """The response to a conversation of user texts with earlier answers between them."""
    messages = []
    for index, text in enumerate(texts):
        messages.append(user(text))
        messages += [{"role": "assistant", "content": answers[index]}] if index < len(answers) else []
    return client.chat.completions.create(model="m", messages=messages)


@pytest.mark.slow
def test_a_session_is_named_by_a_header_or_by_the_path(renderer):
    with served(echo(renderer), renderer) as server:
        by_header = server.client("one")
        by_path = server.client(base_url=f"{server.root}/sessions/two/v1")
        assert ask(by_header, "a").session_id == "one"
        assert ask(by_path, "a").session_id == "two"
        assert by_path.models.list().data[0].object == "model"
        listed = httpx.get(f"{server.root}/sessions").json()["sessions"]
    assert {session["session_id"]: session["turns"] for session in listed} == {"one": 1, "two": 1}


@pytest.mark.slow
def test_headers_or_a_path_that_name_different_sessions_are_refused(renderer):
    with served(ScriptedEngine(lambda request: "0", renderer=renderer), renderer) as server:
        url, body = f"{server.base_url}/chat/completions", {"messages": [user("a")]}
        for path, names in ((url, ["one", "two"]), (f"{server.root}/sessions/two/v1/chat/completions", ["one"])):
            refused = httpx.post(path, json=body, headers=[("X-Session-ID", name) for name in names])
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "X-Session-ID"
        assert httpx.get(f"{server.root}/sessions").json()["sessions"] == []
        taken = httpx.post(url, json=body, headers=[("X-Session-ID", "one")] * 2)
        assert taken.json()["session_id"] == taken.headers["x-session-id"] == "one"


def test_a_session_that_its_client_did_not_name_gets_its_group_where_it_ends(renderer):
    with served(echo(renderer), renderer) as server:
        session_id = ask(server.client(), "a").session_id
        ended = httpx.post(f"{server.root}/sessions/{session_id}/end", json={"group_id": "task-7"})
        assert (ended.json()["group_id"], server.trajectory(session_id).group_id) == ("task-7", "task-7")
        httpx.post(f"{server.root}/sessions", json={"session_id": "s", "group_id": "task-8"})
        assert httpx.post(f"{server.root}/sessions/s/end").json()["group_id"] == "task-8"


def test_without_an_id_every_conversation_is_a_session(renderer):
    with served(echo(renderer), renderer) as server:
        client = server.client()
        first, second = ask(client, "a"), ask(client, "a")
        assert first.session_id != second.session_id
        continued = ask(client, "a", "b", answers=["1"])
        assert continued.session_id == second.session_id
        assert ask(client, "a", "b", "c", answers=["1", "2"]).session_id == second.session_id
        assert ask(client, "a", "b", answers=["0"]).session_id == first.session_id
        assert ask(client, "a", "b", answers=["other"]).session_id not in (first.session_id, second.session_id)
        assert server.trajectory(second.session_id).num_turns == 3


@pytest.mark.slow
def test_conversations_that_differ_in_the_ids_of_tool_calls_alone_are_sessions_of_their_own(renderer):
    with served(ScriptedEngine(lambda request: CALL, renderer=renderer), renderer) as server:
        client = server.client()

        def complete(messages):
            return client.chat.completions.create(model="m", messages=messages, tools=TOOLS)

        for first in [complete([user("a")]) for _ in range(3)]:
            message = first.choices[0].message.to_dict()
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "empty"}
            assert complete([user("a"), message, result]).session_id == first.session_id
            assert [node.parent for node in server.trajectory(first.session_id).nodes] == [-1, 0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("removed", [False, True])
def test_the_end_of_a_session_leaves_an_equal_conversation_its_own(renderer, removed):
    with served(ScriptedEngine(lambda request: "b", renderer=renderer), renderer) as server:
        client = server.client()
        first, second = ask(client, "a").session_id, ask(client, "a").session_id
        httpx.post(f"{server.root}/sessions/{second}/end")
        if removed:
            httpx.delete(f"{server.root}/sessions/{second}")
        assert ask(client, "a", "c", answers=["b"]).session_id == first
        httpx.post(f"{server.root}/sessions/{first}/end")
        with pytest.raises(openai.ConflictError, match="has ended"):
            ask(client, "a", "c", answers=["b"])


def test_parallel_requests_of_a_session_are_branches(renderer):
    arrived, all_arrived = [], asyncio.Event()

    async def wait_for_all(request):
        arrived.append(request)
        if len(arrived) == 9:
            all_arrived.set()
        if len(arrived) > 1:
            await all_arrived.wait()
        return f"answer {len(request.prompt_ids)}"

    engine = ScriptedEngine(wait_for_all, renderer=renderer)

    async def play(server):
        async with server.async_client("s") as client:
            first = await client.chat.completions.create(model="m", messages=[user("a")])
            messages = [user("a"), first.choices[0].message]
            calls = [
                client.chat.completions.create(model="m", messages=[*messages, user("b" * number)])
                for number in range(1, 9)
            ]
            return await asyncio.gather(*calls)

    with served(engine, renderer) as server:
        responses = asyncio.run(play(server))
        trajectory = server.trajectory("s")
    assert all_arrived.is_set()
    assert len(trajectory.leaves()) == 8
    assert {trajectory.nodes[trajectory.nodes[leaf].parent].parent for leaf in trajectory.leaves()} == {1}
    for response in responses:
        path = trajectory.to_messages(trajectory.turns[response.choices[0].turn].node)
        assert path[-1]["content"] == response.choices[0].message.content


@pytest.mark.slow
def test_rewards_are_recorded_for_the_last_turn_or_a_given_one(renderer):
    with served(echo(renderer), renderer) as server:
        client = server.client("s")
        ask(client, "a")
        ask(client, "a", "b", answers=["0"])
        url = f"{server.root}/sessions/s/reward"
        assert httpx.post(url, json={"reward": 0.5, "info": {"right": True}}).json()["reward"] == 0.5
        assert httpx.post(url, json={"reward": 1, "turn": 0}).json()["reward"] == 1.5
        trajectory = server.trajectory("s")
        assert [turn.reward for turn in trajectory.turns] == [1.0, 0.5]
        assert trajectory.turns[1].info == {"right": True}
        for body, reason in [
            ({}, "reward is missing"),
            ({"reward": "1"}, "reward is '1': Input should be a valid number"),
            ({"reward": True}, "reward is True: Input should be a valid number"),
            ({"reward": 1, "turn": 7}, "has 2 turns, and no turn 7"),
            ({"reward": 1, "points": 1}, "unknown field points"),
        ]:
            response = httpx.post(url, json=body)
            assert response.status_code == 400
            assert reason in response.json()["error"]["message"]
        assert httpx.post(f"{server.root}/sessions/none/reward", json={"reward": 1}).status_code == 404


@pytest.mark.slow
def test_an_ended_session_is_readable_and_takes_no_further_turn(renderer, tmp_path):
    ended = []
    with served(echo(renderer), renderer, on_session_end=ended.append) as server:
        client = server.client("s")
        ask(client, "a")
        response = httpx.post(f"{server.root}/sessions/s/end", json={"metrics": {"steps": 3}})
        assert response.json()["ended"] is True
        assert httpx.post(f"{server.root}/sessions/s/end").status_code == 200
        with pytest.raises(openai.ConflictError, match="has ended"):
            ask(client, "a")
        refused = httpx.post(f"{server.root}/sessions/s/reward", json={"reward": 1})
        assert (refused.status_code, "Begin one with another id" in refused.text) == (409, True)
        (tmp_path / "s.mmr").write_bytes(httpx.get(f"{server.root}/sessions/s/trajectory").content)
    (trajectory,) = read_records(tmp_path / "s.mmr")
    assert (trajectory.done, trajectory.truncated, trajectory.metrics) == (True, False, {"steps": 3})
    assert [one.episode_id for one in ended] == ["s"]


@pytest.mark.slow
def test_a_deleted_session_is_gone_and_says_so(renderer):
    ended = []
    with served(echo(renderer), renderer, on_session_end=ended.append) as server:
        ask(server.client("s"), "a")
        assert httpx.delete(f"{server.root}/sessions/s").status_code == 204
        response = httpx.get(f"{server.root}/sessions/s/trajectory")
        assert response.status_code == 410
        assert "it was deleted" in response.json()["error"]["message"]
        with pytest.raises(openai.APIStatusError, match="it was deleted") as gone:
            ask(server.client("s"), "a")
        assert gone.value.status_code == 410
    assert [one.episode_id for one in ended] == ["s"]


async def test_a_session_that_is_deleted_as_a_request_begins_is_gone(renderer):
    gateway = Gateway(echo(renderer), renderer)
    transport = httpx.ASGITransport(Starlette(routes=gateway.routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        await client.post("/sessions", json={"session_id": "s"})
        body = {"messages": [user("a")]}
        asked = asyncio.create_task(client.post("/sessions/s/v1/chat/completions", json=body))
        deleted = asyncio.create_task(client.delete("/sessions/s"))
        assert (await deleted).status_code == 204
        # The order of the two decides whether the session had ended or was gone.
        assert (await asked).status_code in (409, 410)
    await gateway.close()


@pytest.mark.slow
def test_a_session_may_be_begun_with_its_group(renderer):
    with served(echo(renderer), renderer) as server:
        body = {"session_id": "s", "group_id": "task-7", "seed": 3}
        assert httpx.post(f"{server.root}/sessions", json=body).status_code == 201
        assert httpx.post(f"{server.root}/sessions", json=body).status_code == 409
        ask(server.client("s"), "a")
        trajectory = server.trajectory("s")
        assert httpx.post(f"{server.root}/sessions").json()["session_id"]
        assert httpx.post(f"{server.root}/sessions", json={"seed": 2**70}).status_code == 400
    assert (trajectory.group_id, trajectory.seed, trajectory.num_turns) == ("task-7", 3, 1)


async def test_requests_without_a_seed_take_those_that_derive_from_the_seed_of_their_session(renderer):
    engine = echo(renderer)
    gateway = Gateway(engine, renderer)
    transport = httpx.ASGITransport(Starlette(routes=gateway.routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for name, seed in (("a", 3), ("b", 3), ("c", 4), ("d", None)):
            await client.post("/sessions", json={"session_id": name, "seed": seed})
            for path, own in (("chat/completions", None), ("messages", None), ("chat/completions", 7)):
                body = {"messages": [user("a")], **({} if own is None else {"seed": own})}
                await client.post(f"/sessions/{name}/v1/{path}", json=body)
            await client.post(f"/sessions/{name}/v1/messages/count_tokens", json={"messages": [user("a")]})
    await gateway.close()
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[:3] == seeds[3:6]
    assert len({*seeds[:2], *seeds[6:8], 7}) == 5
    assert seeds[2::3] == [7] * 4
    assert seeds[9:11] == [None] * 2


async def test_refused_requests_are_logged_and_counted_in_the_metrics_of_the_record(renderer, caplog, tmp_path):
    gateway = Gateway(echo(renderer), renderer, model="policy")
    transport = httpx.ASGITransport(Starlette(routes=gateway.routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        await client.post("/sessions", json={"session_id": "s"})
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,!!!"}}
        for path, body in (
            ("chat/completions", {"messages": [{"role": "user", "content": 5}]}),
            ("chat/completions", {"messages": [{"role": "user", "content": [image]}]}),
            ("messages", {"messages": [user("a")], "model": "other"}),
            ("messages/count_tokens", {"messages": []}),
            ("responses", {"input": "a", "previous_response_id": "resp_1"}),
            ("responses", {"input": "a"}),
        ):
            await client.post(f"/sessions/s/v1/{path}", json=body)
        await client.post("/v1/responses", json={"input": []})
        await client.post("/sessions/s/end", json={"metrics": {"steps": 3}})
        await client.post("/sessions/s/v1/responses", json={"input": "a"})  # after the end
        figures = (await client.get("/sessions/s")).json()
        (tmp_path / "s.mmr").write_bytes((await client.get("/sessions/s/trajectory")).content)
    await gateway.close()
    (recorded,) = read_records(tmp_path / "s.mmr")
    refused = {"400": 2, "400 invalid_message": 1, "404 model_not_found": 1, "400 previous_response_not_found": 1}
    expected = {**{f"refused_requests/{reason}": count for reason, count in refused.items()}, "steps": 3}
    assert (figures["metrics"], recorded.metrics, figures["turns"]) == (expected, expected, 1)
    of_session = "a request of the session 's'"
    lines = [record.message for record in caplog.records if "refused with HTTP" in record.message]
    assert [line.partition(" is refused")[0] for line in lines] == [of_session] * 5 + ["a request", of_session]
    assert "the gateway was restarted; send the whole conversation" in lines[4]


@pytest.mark.slow
def test_more_sessions_than_the_limit_are_refused_and_none_is_lost(renderer):
    with served(echo(renderer), renderer, limits=GatewayLimits(max_sessions=2)) as server:
        ask(server.client("a"), "x")
        ask(server.client("b"), "x")
        with pytest.raises(openai.InternalServerError, match="max_sessions=2") as full:
            ask(server.client("c"), "x")
        assert full.value.status_code == 503
        assert full.value.response.headers["retry-after"]
        httpx.delete(f"{server.root}/sessions/a")
        ask(server.client("c"), "x")
        assert server.trajectory("b").num_turns == 1


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"max_sessions": 3}, {"max_bytes": 20_000}])
def test_ended_sessions_that_were_handed_over_make_room_for_others(renderer, limits):
    ended = []
    options = {"limits": GatewayLimits(**limits), "on_session_end": ended.append}
    with served(echo(renderer), renderer, **options) as server:
        for name in "abc":
            ask(server.client(name), "x")
        for name in "cb":
            httpx.post(f"{server.root}/sessions/{name}/end")
        for name in "defgh":
            with suppress(openai.InternalServerError):
                ask(server.client(name), "x")
        kept = [session.id for session in server.gateway.sessions()]
        assert [one.episode_id for one in ended] == ["c", "b"]
        assert kept[0] == "a"
        assert {"b", "c"}.isdisjoint(kept)
        gone = httpx.get(f"{server.root}/sessions/b")
    assert (gone.status_code, "another session needed its room" in gone.text) == (410, True)


LONG = "x" * 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("", "group_id", LONG),
        ("/s/reward", "info", {"judge": LONG}),
        ("/s/reward", "info", {"parts": [{} for _ in range(20_000)]}),  # 60 KB of JSON, 1.4 MB in memory
        ("/s/end", "error", LONG),
        ("/s/end", "group_id", LONG),
        ("/s/end", "metrics", {f"m{number}": 1 for number in range(300_000)}),
    ],
)
def test_a_field_that_is_kept_has_a_limit_of_its_own(renderer, path, field, value):
    with served(echo(renderer), renderer) as server:
        ask(server.client("s"), "a")
        before = httpx.get(f"{server.root}/sessions/s").json()["estimated_bytes"]
        body = {field: value, **({"reward": 1} if path.endswith("reward") else {})}
        response = httpx.post(f"{server.root}/sessions{path}", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert "max_field_bytes=1048576" in response.json()["error"]["message"]
        sessions = httpx.get(f"{server.root}/sessions").json()["sessions"]
        assert [(one["session_id"], one["estimated_bytes"], one["ended"]) for one in sessions] == [("s", before, False)]


@pytest.mark.slow
def test_everything_that_is_kept_of_a_session_is_counted(renderer):
    text = "x" * 100_000
    tools = [{"type": "function", "function": {"name": "f", "description": text}}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
    called = [user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    with served(echo(renderer), renderer) as server:
        url = f"{server.root}/sessions"

        def counted(name, path, body):
            before = len(httpx.get(url).json()["sessions"]) and httpx.get(f"{url}/{name}").json()["estimated_bytes"]
            assert httpx.post(f"{url}{path}", json=body, timeout=60).is_success
            return httpx.get(f"{url}/{name}").json()["estimated_bytes"] - before

        chat = "/s/v1/chat/completions"
        assert counted("s", "", {"session_id": "s", "group_id": text}) > len(text)
        assert counted("s", "/s/v1/chat/completions", {"messages": [user("a")]}) < len(text)
        for body in (
            {"messages": [user("a")], "tools": tools},
            {"messages": called},
            {"messages": [{"role": "assistant", "content": "a", "reasoning_content": text}, user("b")]},
            {"messages": [{"role": "user", "content": "a", "name": text}]},
        ):
            assert counted("s", chat, body) > len(text)
        assert counted("s", "/s/reward", {"reward": 1, "info": {"judge": text}}) > len(text)
        assert counted("s", "/s/reward", {"reward": 1, "info": {"judge": text}}) == 0  # in place of the former
        assert counted("s", "/s/reward", {"reward": 1}) < -len(text)
        assert counted("s", "/s/end", {"error": text, "metrics": {text: 1}}) > 2 * len(text)
        assert httpx.delete(f"{url}/s").status_code == 204


@pytest.mark.slow
def test_sessions_without_turns_and_infos_fill_the_gateway_too(renderer):
    with served(echo(renderer), renderer, limits=GatewayLimits(max_bytes=300_000)) as server:
        url, body = f"{server.root}/sessions", {"group_id": "x" * 100_000}
        statuses = [httpx.post(url, json={**body, "session_id": f"s{number}"}).status_code for number in range(5)]
        assert statuses == [201, 201, 201, 503, 503]
        with pytest.raises(openai.InternalServerError, match="max_bytes=300000"):
            ask(server.client("s2"), "a")
        httpx.delete(f"{url}/s0")
        httpx.delete(f"{url}/s1")
        ask(server.client("s2"), "a")
        reward = {"reward": 1, "info": {"judge": "x" * 300_000}}
        assert httpx.post(f"{url}/s2/reward", json=reward).status_code == 200
        assert httpx.post(f"{url}/s2/reward", json=reward).status_code == 503
        assert httpx.post(f"{url}/s2/reward", json={"reward": 1}).status_code == 200  # which makes room
        assert httpx.post(f"{url}/s2/reward", json=reward).status_code == 200
        assert httpx.post(f"{url}/s2/end", json={"metrics": {"steps": 1}}).status_code == 200


async def test_what_a_removed_session_kept_is_not_counted_any_more(renderer):
    arrived, release = asyncio.Event(), asyncio.Event()

    async def slow(request):
        arrived.set()
        await release.wait()
        return "x"

    gateway = Gateway(ScriptedEngine(slow, renderer=renderer), renderer, limits=GatewayLimits(max_bytes=20_000))
    transport = httpx.ASGITransport(Starlette(routes=gateway.routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for number in range(20):
            arrived.clear(), release.clear()
            path = "/v1/chat/completions" if number % 2 else "/sessions/s/v1/chat/completions"
            path = path.replace("/s/", f"/s{number}/")
            asked = asyncio.create_task(client.post(path, json={"messages": [user("a" * 500)]}))
            await arrived.wait()
            (session,) = (await client.get("/sessions")).json()["sessions"]
            await client.delete(f"/sessions/{session['session_id']}")
            release.set()
            assert (await asked).status_code == 409
        release.set()
        assert (await client.post("/v1/chat/completions", json={"messages": [user("a")]})).status_code == 200
    await gateway.close()


@pytest.fixture
def now(monkeypatch):
    """The time of the clock of the sessions, which a test moves."""
    found = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: found[0], time=time.time)
    for module in (session, session_store):
        monkeypatch.setattr(module, "time", clock)
    return found


async def test_an_idle_session_is_evicted_with_its_trajectory_delivered(renderer, now, caplog):
    """The clock of the store is moved; a session with a request in flight stays."""
    release, arrived = asyncio.Event(), asyncio.Event()

    async def slow(request):
        if request.session_id == "busy":
            arrived.set()
            await release.wait()
        return "x"

    ended = []

    gateway = Gateway(
        ScriptedEngine(slow, renderer=renderer),
        renderer,
        limits=GatewayLimits(idle_seconds=60),
        on_session_end=ended.append,
    )
    transport = httpx.ASGITransport(Starlette(routes=gateway.routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:

        def ask_session(name):
            return client.post(f"/sessions/{name}/v1/chat/completions", json={"messages": [user("a")]})

        await ask_session("idle")
        busy = asyncio.create_task(ask_session("busy"))
        await arrived.wait()
        now[0] += 61
        await ask_session("new")
        with pytest.raises(RequestError, match="no request for 60 s"):
            gateway.trajectory("idle")
        assert (await ask_session("idle")).status_code == 410
        release.set()
        assert (await busy).status_code == 200
        assert gateway.trajectory("busy").num_turns == 1
    await gateway.close()
    assert ended[0].episode_id == "idle"
    assert (ended[0].truncated, ended[0].num_turns) == (True, 1)
    assert "session idle: it had no request for 60 s and was evicted, with 1 turns" in caplog.text


async def test_a_trajectory_that_is_not_accepted_stays_readable_and_disturbs_no_other_session(renderer, now, caplog):
    delivered, disk_is_full = [], [True]

    def deliver(trajectory):
        if trajectory.episode_id.startswith("bad") and disk_is_full:
            raise OSError("the disk is full")
        delivered.append(trajectory.episode_id)

    limits = GatewayLimits(idle_seconds=60)
    gateway = Gateway(echo(renderer), renderer, limits=limits, on_session_end=deliver)
    transport = httpx.ASGITransport(Starlette(routes=gateway.routes()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:

        async def ask_session(name):
            path = f"/sessions/{name}/v1/chat/completions"
            return (await client.post(path, json={"messages": [user("a")]})).status_code

        assert await ask_session("bad-1") == 200
        now[0] += 61
        assert await ask_session("bad-2") == 200
        assert gateway.trajectory("bad-1").num_turns == 1
        assert await ask_session("good") == 200
        with pytest.raises(SessionNotDeliveredError, match="the disk is full") as failed:
            await gateway.close()
        assert failed.value.session_ids == ("bad-1", "bad-2")
        assert delivered == ["good"]
        assert gateway.trajectory("bad-1").num_turns == 1
        disk_is_full.clear()
        await gateway.close()
        assert delivered == ["good", "bad-1", "bad-2"]
        now[0] += 61
        with pytest.raises(RequestError, match="is gone"):
            gateway.trajectory("bad-1")
    for name in ("bad-1", "bad-2"):
        assert f"session {name}: on_session_end failed, its trajectory was not delivered" in caplog.text
    assert "the disk is full" in caplog.text


@pytest.mark.parametrize("failures", [0, 3])
def test_a_session_that_is_ended_several_times_at_once_is_delivered_once(renderer, failures):
    calls = []

    def deliver(trajectory):
        calls.append(trajectory.episode_id)
        if len(calls) <= failures:
            raise RuntimeError("not now")

    async def play():
        gateway = Gateway(echo(renderer), renderer, on_session_end=deliver)
        transport = httpx.ASGITransport(Starlette(routes=gateway.routes()))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            await client.post("/sessions/s/v1/chat/completions", json={"messages": [user("a")]})
            ends = [client.post("/sessions/s/end") for _ in range(8)]
            statuses = [response.status_code for response in await asyncio.gather(*ends)]
        await gateway.close()
        return statuses

    assert sorted(asyncio.run(play())) == [200] * (8 - failures) + [500] * failures
    assert calls == ["s"] * (failures + 1)


@pytest.mark.parametrize("metrics", ['{"steps": "3"}', '{"\\ud800": 1}', '{"steps": 1e999}'])
def test_a_metric_that_is_refused_leaves_the_session_as_it_was(renderer, metrics):
    with served(echo(renderer), renderer) as server:
        ask(server.client("s"), "a")
        body = f'{{"error": "wrong", "truncated": true, "metrics": {metrics}}}'
        headers = {"Content-Type": "application/json"}
        refused = httpx.post(f"{server.root}/sessions/s/end", content=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"].partition(".")[0]) == (400, "metrics")
        trajectory = server.trajectory("s")
        assert (trajectory.finished, trajectory.truncated, trajectory.error) == (False, False, "")


@pytest.mark.parametrize("name", ["a/b", "a b", "ü", "x" * 129, "..%2f", ".", ".."])
def test_an_id_that_is_no_plain_name_is_refused(renderer, name):
    with served(echo(renderer), renderer) as server:
        response = httpx.post(
            f"{server.base_url}/chat/completions",
            headers={b"X-Session-ID": name.encode()},
            json={"messages": [user("a")]},
        )
    assert response.status_code == 400
