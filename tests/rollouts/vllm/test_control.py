"""Control calls to a scripted server: their order, what is refused, and what state a failure leaves."""

import asyncio

import pytest
from engine_inputs import held
from fake_http import error_response, json_response
from fake_server import ABORT, ENCODER, LABEL, MM, PREFIX, RELOAD, FakeVLLM

from rollouts.errors import (
    ArgumentError,
    CapabilityError,
    EngineError,
    ServerError,
    WeightUpdateError,
)


@pytest.fixture
async def server(reloadable_model_dir):
    async with FakeVLLM(root=str(reloadable_model_dir)) as server:
        yield server


# Pausing.


async def test_a_pause_forgets_what_the_server_held_before_and_after(server, control):
    await control.pause()
    assert server.events == ["forget", "/pause", "forget"]
    assert server.requests[-1].query == {"mode": "abort", "clear_cache": "true"}
    assert await control.is_paused()
    await control.resume()
    assert not await control.is_paused()


async def test_the_error_without_development_mode_names_the_cure_and_nothing_is_sent(server, control, other):
    server.control = False
    calls = [
        control.pause(),
        control.resume(),
        control.is_paused(),
        control.sleep(),
        control.wake_up(),
        control.is_sleeping(),
        control.reset_prefix_cache(),
        control.reset_mm_cache(),
        control.reset_encoder_cache(),
        control.abort_all(),
        control.update_weight_version("v"),
        control.update_weights(other, "v"),
        control.served_version(),
    ]
    for call in calls:
        with pytest.raises(CapabilityError, match="VLLM_SERVER_DEV_MODE=1"):
            await call
    assert not server.requests


# Sleeping.


@pytest.mark.parametrize(
    ("level", "call", "words"),
    [
        (2, lambda control, _: control.resume(), "level 2"),
        (1, lambda control, _: control.sleep(2), "sleeps already"),
        (1, lambda control, other: control.update_weights(other, "v"), r"wake_up\(\[\"weights\"\]\)"),
        (0, lambda control, _: control.reset_encoder_cache(), "pause first"),
        (0, lambda control, _: control.sleep(3), "level"),
        (0, lambda control, _: control.wake_up(["weight"]), "weight"),
        (0, lambda control, _: control.pause("now"), "now"),
    ],
)
async def test_what_the_state_of_the_server_forbids_is_not_sent(server, control, other, level, call, words):
    server.level = level  # another client put it to sleep, which pauses it
    if level:
        server._running.clear()
    with pytest.raises((EngineError, ArgumentError), match=words):
        await call(control, other)
    assert set(server.events) <= {"forget"}


async def test_dropped_weights_are_loaded_before_a_server_is_awake(server, control, other):
    await control.sleep(2)
    for tags in (None, ["kv_cache"], ["weights", "kv_cache"]):
        with pytest.raises(EngineError, match="weights were dropped"):
            await control.wake_up(tags)
    with pytest.raises(EngineError, match="have no memory"):
        await control.update_weights(other, "v")
    await control.wake_up(["weights"])
    with pytest.raises(EngineError, match="weights were dropped"):
        await control.wake_up()
    await control.update_weights(other, "v")
    assert await control.is_paused()
    await control.wake_up()
    assert not await control.is_sleeping()
    assert server.loaded[-1] == str(other)


# Caches.


async def test_a_prefix_cache_that_was_not_reset_is_an_error_although_vllm_returns_200(server, control):
    server.busy = 2
    with pytest.raises(ServerError, match="requests hold blocks"):
        await control.reset_prefix_cache()
    server.busy = 0
    await control.reset_prefix_cache()


# Ending requests.


async def test_an_abort_without_ids_is_not_sent_because_it_would_abort_everything(server, control):
    await control.abort([])
    assert not server.requests


async def test_an_abort_finds_the_route_of_older_servers(server, control):
    server.script[ABORT] += [json_response({"detail": "Not Found"}, 404)]
    await control.abort(["a"])
    assert server.requests[-1].path == "/abort_requests"
    assert server.requests[-1].json == {"request_ids": ["generate-tokens-a"]}


# Weights.


async def test_an_update_pauses_loads_empties_labels_and_resumes_in_this_order(server, control, other):
    await control.update_weights(other, "v7", "wait")
    steps = [event for event in server.events if event != "forget"]
    assert steps == ["/pause", "/pause", RELOAD, PREFIX, MM, ENCODER, LABEL, "version v7", "/resume"]
    assert server.events[0] == "forget"
    assert server.events[server.events.index("version v7") :].count("forget") == 1  # before it runs again
    assert server.events[-1] == "/resume"
    assert server.loaded[-1] == str(other)
    assert server.weight_version == await control.served_version() == "v7"
    assert next(seen for seen in server.requests if seen.path == "/pause").query["mode"] == "wait"


async def test_a_server_that_was_paused_stays_paused(server, control, other):
    await control.pause()
    await control.update_weights(other, "v1")
    assert await control.is_paused()


async def test_a_checkpoint_that_does_not_fit_is_not_sent_to_the_server(server, control, other):
    (other / "model.safetensors").write_bytes(b"half of a file")
    with pytest.raises(WeightUpdateError, match="Nothing was changed"):
        await control.update_weights(other, "v1")
    assert not server.events


async def test_check_false_sends_a_directory_that_only_the_server_can_read(server, control):
    await control.update_weights("/on/another/machine", "v1", check=False)
    assert server.loaded[-1] == "/on/another/machine"


async def test_after_a_failed_load_the_previous_weights_are_loaded_again(server, control, other):
    server.bad.add(str(other))
    with pytest.raises(WeightUpdateError, match=r"loaded again; the server runs with them.*Worker failed"):
        await control.update_weights(other, "v1")
    assert server.loaded == [server.root, server.root]
    assert not server.paused
    assert LABEL not in server.events
    steps = [event for event in server.events if event != "forget"]
    assert steps == ["/pause", RELOAD, RELOAD, PREFIX, MM, ENCODER, "/resume"]


async def test_a_server_without_usable_weights_stays_paused_until_it_has_some(server, control, other):
    server.bad |= {str(other), server.root}
    with pytest.raises(WeightUpdateError, match="left paused"):
        await control.update_weights(other, "v1")
    assert server.paused
    for call in (control.resume(), control.wake_up()):
        with pytest.raises(EngineError, match="garbage"):
            await call
    assert server.paused
    server.bad.clear()
    await control.update_weights(other, "v1")
    assert not server.paused


async def test_the_state_of_a_server_is_forgotten_when_it_restarts(server, control, other):
    server.bad |= {str(other), server.root}
    with pytest.raises(WeightUpdateError):
        await control.update_weights(other, "v1")
    server.started_at += 60
    await control.resume()
    assert not server.paused


@pytest.mark.parametrize("path", [PREFIX, LABEL])
async def test_a_server_with_new_weights_and_old_caches_stays_paused_until_the_next_update(
    server, control, other, path
):
    server.script[path] += [error_response()]
    with pytest.raises(WeightUpdateError, match=r"has the weights .* left paused.*it broke"):
        await control.update_weights(other, "v1")
    assert server.paused
    await control.update_weights(other, "v1")
    assert not server.paused


async def test_a_pause_that_fails_leaves_the_server_running_with_its_weights(server, control, other):
    server.script["/pause"] += [error_response()]
    with pytest.raises(ServerError, match="it broke"):
        await control.update_weights(other, "v1")
    assert RELOAD not in server.events
    assert server.events[-1] == "forget"
    assert "/resume" in server.events


async def test_nothing_resumes_a_server_in_the_middle_of_an_update(server, control, other):
    updating, release = await held(server, RELOAD, control.update_weights(other, "v1"))
    calls = [
        control.resume(),
        control.wake_up(),
        control.sleep(),
        control.update_weights(other, "v2"),
    ]
    for call in calls:
        with pytest.raises(EngineError, match="is under way"):
            await call
    release.set()
    await updating
    assert not server.paused


async def test_a_cancelled_update_is_completed(server, control, other):
    updating, release = await held(server, RELOAD, control.update_weights(other, "v1"))
    updating.cancel()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await updating
    assert server.loaded[-1] == str(other)
    assert server.weight_version == "v1"
    assert not server.paused


# Updates of an engine.


@pytest.mark.parametrize("version", ["", None])
async def test_a_version_without_a_name_is_refused_before_anything_is_sent(engine, server, version):
    with pytest.raises(ArgumentError, match=r"version is .*not empty"):
        await engine.update_weights("directory", version)
    assert not server.requests


# Watching.


async def test_health_is_false_at_the_first_refusal_and_where_nothing_answers(server, control):
    server.script["/health"] += [error_response(503)]
    assert not await control.health()
    assert await control.health()
    await server.stop()
    assert not await control.health()
