"""Messages that the served model's template prints nothing of are mapped to a role that it prints, or refused."""

import httpx
import pytest
from gateway_server import TOOLS, served, user

from renderers import load_renderer
from rollouts.testing import ScriptedEngine, tiny_qwen3_vl

HEAD = "{%- for m in messages %}"
TURN = "{{- '<|im_start|>' + m.role + '\\n' }}{{- m.content }}{{- '<|im_end|>\\n' }}"
TAIL = "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"

ANY_ROLE = HEAD + TURN + TAIL
NO_DEVELOPER = f"{HEAD}{{%- if m.role != 'developer' %}}{TURN}{{%- endif %}}{TAIL}"
REFUSES_DEVELOPER = f"{HEAD}{{%- if m.role == 'developer' %}}{{{{ raise_exception('no') }}}}{{%- endif %}}{TURN}{TAIL}"
FIRST = "m.role in ('user', 'assistant') or (m.role == 'system' and loop.first)"
FIRST_SYSTEM = f"{HEAD}{{%- if {FIRST} %}}{TURN}{{%- endif %}}{TAIL}"
USERS_ALONE = f"{HEAD}{{%- if m.role in ('user', 'assistant') %}}{TURN}{{%- endif %}}{TAIL}"
#: Prints calls, and no content beside them.
CALLS_ALONE = (
    f"{HEAD}{{%- if m.tool_calls %}}{{{{- '<|im_start|>assistant\\n<tool_call>\\n' }}}}"
    "{{- '{\"name\": ' + (m.tool_calls[0].function.name | tojson) + ', \"arguments\": {}}' }}"
    f"{{{{- '\\n</tool_call><|im_end|>\\n' }}}}{{%- else %}}{TURN}{{%- endif %}}{TAIL}"
)

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "red"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_qwen3_vl(tmp_path_factory.mktemp("roles") / "model", weights=False)


@pytest.fixture
def serving_template(directory):
    """What serves a template: a context with a server that answers every request."""

    def serve(template, script=("x",) * 9):
        renderer = load_renderer(directory, chat_template=template)
        return served(ScriptedEngine(list(script), renderer=renderer), renderer)

    return serve


def developer(text):
    return {"role": "developer", "content": text}


def post(server, messages, **fields):
    return httpx.post(
        f"{server.root}/sessions/s/v1/chat/completions", json={"messages": messages, **fields}, timeout=30
    )


def prompt_text(server):
    """The text of the last prompt of the session."""
    trajectory = server.trajectory("s")
    ids = trajectory.token_ids(trajectory.nodes[trajectory.turns[-1].node].parent).tolist()
    return server.gateway._settings.renderer.renderer.tokenizer.decode(ids)


def refused(server, messages, place, **fields):
    """The text of the error with which a request is refused."""
    response = post(server, messages, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_message", place)
    assert error["message"].startswith(place)
    return error["message"]


@pytest.mark.parametrize(
    ("template", "role"),
    [(NO_DEVELOPER, "system"), (REFUSES_DEVELOPER, "system"), (FIRST_SYSTEM, "system"), (ANY_ROLE, "developer")],
)
def test_developer_messages_are_system_messages_where_the_template_reads_only_those(serving_template, template, role):
    with serving_template(template) as server:
        assert post(server, [developer("Be brief."), user("Hi")]).status_code == 200
        assert f"<|im_start|>{role}\nBe brief.<|im_end|>" in prompt_text(server)
        assert server.trajectory("s").nodes[0].messages[0]["role"] == "developer"


@pytest.mark.slow
@pytest.mark.parametrize("message", [developer("Be brief."), {"role": "system", "content": "Be brief."}])
def test_a_message_of_a_role_that_is_not_printed_is_refused_with_a_role_that_is(serving_template, message):
    with serving_template(USERS_ALONE) as server:
        reason = refused(server, [user("Hi"), {"role": "assistant", "content": "x"}, message], "messages[2].content")
        assert message["role"] in reason
        assert "Send the message as user" in reason
        assert post(server, [user("Hi")]).status_code == 200
        assert server.trajectory("s").num_turns == 1


@pytest.mark.slow
def test_a_message_at_a_place_where_it_is_not_printed_is_refused_in_a_later_request_too(serving_template):
    with serving_template(FIRST_SYSTEM) as server:
        opening = [user("Hi")]
        answer = post(server, opening).json()["choices"][0]["message"]
        late = {"role": "system", "content": "Be brief."}
        for _ in range(2):
            reason = refused(server, [*opening, answer, late, user("And?")], "messages[2].content")
            assert "at other places" in reason
        assert server.trajectory("s").num_turns == 1


@pytest.mark.slow
def test_the_result_and_the_call_of_a_tool_that_are_not_printed_are_refused(serving_template):
    messages = [user("Hi"), {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]
    with serving_template(USERS_ALONE) as server:
        assert "chat_template=" in refused(server, messages, "messages[1].tool_calls[0]", tools=TOOLS)
        messages[1]["content"] = "I look."
        del messages[2]
        refused(server, messages, "messages[1].tool_calls[0]", tools=TOOLS)


@pytest.mark.slow
def test_parts_that_are_not_printed_are_refused(serving_template):
    first_part = TURN.replace("m.content", "(m.content if m.content is string else m.content[0].text)")
    parts = [{"type": "text", "text": "shown"}, {"type": "text", "text": "lost"}]
    with serving_template(HEAD + first_part + TAIL) as server:
        refused(server, [{"role": "user", "content": parts}], "messages[0].content[1]")


def test_content_beside_calls_that_are_printed_is_not_refused(serving_template):
    """The model may have written it, and the client could not change that."""
    assistant = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
    with serving_template(CALLS_ALONE) as server:
        assert post(server, [user("Hi"), assistant, RESULT], tools=TOOLS).status_code == 200
        assert "look" in prompt_text(server)
        assert "I look." not in prompt_text(server)


def test_names_and_reasoning_that_are_not_printed_are_accepted(serving_template):
    assistant = {"role": "assistant", "content": "x", "name": "bot", "reasoning_content": "thought"}
    with serving_template(ANY_ROLE) as server:
        assert post(server, [{**user("Hi"), "name": "ann"}, assistant, user("And?")]).status_code == 200
