# ruff: noqa: RUF001, RUF002  (DeepSeek spells its tokens with a fullwidth bar)
"""What the prompts of DeepSeek V3.2 and V4 share: control tokens, the sections of a system message, calls in DSML.

A call is written as

    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>
    </｜DSML｜invoke>

with strings as they are and every other value as JSON.
"""

import json
from collections.abc import Mapping
from typing import Any

from renderers.errors import TemplateError, short_repr, type_name
from renderers.template.chat_template import Messages, Tools
from renderers.template.traced import plain, traced_join
from renderers.template.traced_input import traced_value
from renderers.template.traced_json import traced_json

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"

#: The control tokens of every prompt with DSML calls.
CONTROL_TOKENS = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML)


def check_thinking_mode(mode: object) -> bool:
    """Whether `mode` is "thinking". Raises `TemplateError` for modes other than "thinking" and "chat"."""
    if mode not in ("chat", "thinking"):
        raise TemplateError(f"unknown thinking_mode {short_repr(mode)}", cure="It is 'chat' or 'thinking'.")
    return mode == "thinking"


def with_tools(messages: Messages, tools: Tools | None) -> list[tuple[int, Mapping[str, Any]]]:
    """The messages with their indices; `tools` are added to the system message at the start.

    The encoders read tools from a message. Without a system message at the start, an empty one with index -1 is added.
    """
    numbered: list[tuple[int, Mapping[str, Any]]] = list(enumerate(messages))
    if not tools:
        return numbered
    if not messages or messages[0]["role"] != "system":
        return [(-1, {"role": "system", "content": "", "tools": tools}), *numbered]
    if messages[0].get("tools"):
        raise TemplateError(
            "tools are declared twice, by the message itself and beside the messages",
            cure="Declare them once.",
            message_index=0,
        )
    return [(0, {**messages[0], "tools": tools}), *numbered[1:]]


def message_text(message: Mapping[str, Any], index: int, *, between_parts: str | None = None) -> str:
    """The content of a message as one text; `between_parts` joins several text parts, None refuses them.

    That of a developer message must not be empty.
    """
    role, content = message["role"], message.get("content")
    if not content:
        if role == "developer":
            raise TemplateError(
                "an empty developer message", cure="Leave it out, or give it a text.", message_index=index
            )
        return ""
    if isinstance(content, str):
        return content
    if len(content) > 1 and between_parts is None:
        raise TemplateError(
            f"{len(content)} text parts, but this format does not define their separator in a message of role {role!r}",
            cure="Join them into one text.",
            message_index=index,
        )
    return traced_join(between_parts or "", [part["text"] for part in content])


def json_text(value: Any, where: str) -> str:
    """`value` as JSON on one line, not ASCII-escaped, with its provenance spans."""
    try:
        return traced_json(value)
    except (TypeError, ValueError) as error:
        raise TemplateError(f"{where} cannot be written as JSON: {error}", cure="Use plain JSON values.") from error


def sections(message: Mapping[str, Any], tools_head: str, tools_tail: str) -> list[str]:
    """The sections of a system or developer message: its tools between head and tail, the schema of replies."""
    schemas: list[str] = []
    for index, tool in enumerate(message.get("tools") or ()):
        if not isinstance(tool.get("function"), Mapping):
            raise TemplateError(
                f"tools[{index}] has no function",
                cure='A tool is {"type": "function", "function": {"name": ..., "parameters": ...}}.',
            )
        schemas.append(json_text(tool["function"], f"tools[{index}]"))
    pieces = ["\n\n", tools_head, traced_join("\n", schemas), tools_tail] if schemas else []
    if message.get("response_format"):
        head = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        pieces += [head, json_text(message["response_format"], "response_format")]
    return pieces


def assistant_turn(message: Mapping[str, Any], index: int, block: str, *, thinks: bool) -> list[str]:
    """The reasoning (if `thinks`), content and calls of an assistant message; `block` is the calls' tag."""
    pieces = [message.get("reasoning_content") or "", END_THINK] if thinks else []
    pieces.append(message_text(message, index))
    if message.get("tool_calls"):
        calls = [_invocation(call["function"], index, number) for number, call in enumerate(message["tool_calls"])]
        pieces += ["\n\n", traced_join("\n", (f"<{DSML}{block}>", *calls, f"</{DSML}{block}>"))]
    return pieces


def _invocation(function: Mapping[str, Any], index: int, number: int) -> str:
    path = f"tool_calls[{number}].function.arguments"
    parameters: list[str] = []
    for name, value in _arguments(function["arguments"], index, path).items():
        is_text = isinstance(value, str)
        text = value if is_text else json_text(value, f"{path}.{plain(str(name))}")
        attribute = f'" string="{"true" if is_text else "false"}">'
        parameters.append(traced_join("", (f'<{DSML}parameter name="', name, attribute, text, f"</{DSML}parameter>")))
    opening = traced_join("", (f'<{DSML}invoke name="', function["name"], '">'))
    return traced_join("\n", (opening, traced_join("\n", parameters), f"</{DSML}invoke>"))


def _arguments(arguments: Any, index: int, path: str) -> Mapping[str, Any]:
    """The arguments of a call as a dict; text that is not JSON, as models sample it, is one parameter."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(plain(arguments))
        except (ValueError, RecursionError):
            return {"arguments": arguments}
        arguments = traced_value(parsed, index, path)
    if not isinstance(arguments, Mapping):
        raise TemplateError(
            f"{path} is {type_name(arguments)}, but a call takes parameters with names",
            cure="Give the arguments as a JSON object.",
            message_index=index,
        )
    return arguments
