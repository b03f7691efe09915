# ruff: noqa: RUF001, RUF002, RUF003  (DeepSeek spells its tokens with a fullwidth bar)
"""The prompts of DeepSeek V3.2 and V4, whose models have no chat template, and which of them a model has.

A call is written as

    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>
    </｜DSML｜invoke>

with strings as they are and every other value as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from renderers.errors import PromptRefusedError, short_repr, type_name
from renderers.template.chat_template import Messages, PythonTemplate, Tools, message_mark
from renderers.template.environment import traced_json
from renderers.template.traced import plain, traced_join, traced_value
from renderers.tokens.tokenizer import TemplateTokenizer

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
    """Whether `mode` is "thinking". Raises `PromptRefusedError` for modes other than "thinking" and "chat"."""
    if mode not in ("chat", "thinking"):
        raise PromptRefusedError(f"unknown thinking_mode {short_repr(mode)}", cure="It is 'chat' or 'thinking'.")
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
        raise PromptRefusedError(
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
            raise PromptRefusedError(
                "an empty developer message", cure="Leave it out, or give it a text.", message_index=index
            )
        return ""
    if isinstance(content, str):
        return content
    if len(content) > 1 and between_parts is None:
        raise PromptRefusedError(
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
        raise PromptRefusedError(
            f"{where} cannot be written as JSON: {error}", cure="Use plain JSON values."
        ) from error


def sections(message: Mapping[str, Any], tools_head: str, tools_tail: str) -> list[str]:
    """The sections of a system or developer message: its tools between head and tail, the schema of replies."""
    schemas: list[str] = []
    for index, tool in enumerate(message.get("tools") or ()):
        if not isinstance(tool.get("function"), Mapping):
            raise PromptRefusedError(
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
    """The reasoning (if `thinks`), content and calls of an assistant message; `block` is the name of the calls' tag."""
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
    """The arguments of a call as a dict; text that is not JSON (models sample such text) becomes a single parameter."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(plain(arguments))
        except ValueError:
            return {"arguments": arguments}
        arguments = traced_value(parsed, index, path)
    if not isinstance(arguments, Mapping):
        raise PromptRefusedError(
            f"{path} is {type_name(arguments)}, but a call takes parameters with names",
            cure="Give the arguments as a JSON object.",
            message_index=index,
        )
    return arguments


# The prompt of DeepSeek V3.2, whose repositories ship a Python encoder (`encoding/encoding_dsv32.py`) and no template.
#
# A result names no call, so there must be one result for each call, in the order of the calls; anything else is
# refused, and so are values that the encoder would print as Python (`None`, a list). Reasoning is printed only behind
# the last user or developer message. Two limits of the encoder do not apply here: in thinking mode an assistant message
# may lack reasoning, because a model may sample none, and a developer message may precede the last question.
#
# Sources: the encoder as copied by vLLM and SGLang, and the vendor's expected output, from which the blank lines of the
# preamble come (both copies lost them).


V32_SOURCE = (
    f"DeepSeek V3.2 prompt encoder: {BOS}system{USER}question{ASSISTANT}{THINK}reasoning{END_THINK}answer\n\n"
    f"<{DSML}function_calls>calls</{DSML}function_calls>{EOS}\n\n"
    "<function_results>\n<result>result</result>\n</function_results>"
)

_V32_TOOLS_HEAD = f"""## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}function_calls>" block like the following \
as part of your reply to the user:
<{DSML}function_calls>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, \
while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type \
parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<{DSML}function_calls>
...
</{DSML}function_calls>

<function_results>
...
</function_results>

{THINK}...thinking about results{END_THINK}

Here are the functions available in JSONSchema format:
<functions>
"""
_V32_TOOLS_TAIL = "\n</functions>\n"


def deepseek_v32_prompt(
    messages: Messages, tools: Tools | None, *, add_generation_prompt: bool, thinking_mode: str = "chat"
) -> str:
    """Print a conversation for DeepSeek V3.2; `thinking_mode` is "chat" or "thinking".

    `tools` are added to the system message at the start, or to an empty one added there. System and developer
    messages may have the encoder's own fields `tools` and `response_format`.
    """
    thinking = check_thinking_mode(thinking_mode)
    numbered = with_tools(messages, tools)
    queries = [place for place, (_, message) in enumerate(numbered) if message["role"] in ("user", "developer")]
    last_query = queries[-1] if queries else -1

    pieces = [BOS]
    results = _ToolResults()
    for place, (index, message) in enumerate(numbered):
        role = message["role"]
        if index >= 0:
            pieces.append(message_mark(index))
        if role != "tool":
            results.check_complete()
        if role == "assistant":
            results = _ToolResults(index, message.get("tool_calls") or ())
            thinks = thinking and place > last_query
            pieces += [*assistant_turn(message, index, "function_calls", thinks=thinks), EOS]
            continue
        if role == "tool":
            pieces += results.printed(message, index)
        else:
            pieces += _printed_text(message, index)
        if role == "system" or (role == "tool" and results.missing):
            continue
        following = numbered[place + 1] if place + 1 < len(numbered) else None
        if following is None and not add_generation_prompt:
            continue
        if following is None:
            pieces.append(message_mark(None))
        elif following[1]["role"] == "assistant" and role != "tool":
            pieces.append(message_mark(following[0]))
        # No assistant token follows results. The text behind results belongs to their message, so that the region of
        # the assistant message starts with the usual generation prompt or with its own text.
        pieces += ["\n\n" if role == "tool" else ASSISTANT, THINK if thinking and place >= last_query else END_THINK]
    results.check_complete()
    return traced_join("", pieces)


@dataclass(slots=True)
class _ToolResults:
    """The results of the calls of one assistant message, counted while they are printed."""

    index: int = -1
    calls: Sequence[Mapping[str, Any]] = ()
    count: int = 0

    @property
    def missing(self) -> int:
        return len(self.calls) - self.count

    def printed(self, message: Mapping[str, Any], index: int) -> list[str]:
        if not self.missing:
            raise PromptRefusedError(
                "a result without a call", cure="Put it behind the assistant message that calls.", message_index=index
            )
        call_id, expected = message.get("tool_call_id"), self.calls[self.count].get("id")
        ids = [call.get("id") for call in self.calls]
        if call_id is not None and expected is not None and call_id != expected and call_id in ids:
            raise PromptRefusedError(
                f"the result of call {str.__str__(call_id)!r} where that of {str.__str__(expected)!r} is expected; the "
                "format distinguishes results by their order only",
                cure="Put the results into the order of the calls.",
                message_index=index,
            )
        text = message_text(message, index)
        head = [] if self.count else ["\n\n<function_results>"]
        self.count += 1
        tail = [] if self.missing else ["\n</function_results>"]
        return [*head, "\n<result>", text, "</result>", *tail]

    def check_complete(self) -> None:
        # Without any result the assistant message is the last one, or its calls were abandoned.
        if self.count and self.missing:
            raise PromptRefusedError(
                f"{len(self.calls)} calls but {self.count} results, whose block the encoder would leave open",
                cure="Give one result for each call.",
                message_index=self.index,
            )


def _printed_text(message: Mapping[str, Any], index: int) -> list[str]:
    if message["role"] == "user":
        return [USER, message_text(message, index)]
    printed_sections = sections(message, _V32_TOOLS_HEAD, _V32_TOOLS_TAIL)
    if message["role"] == "system":
        return [message_text(message, index), *printed_sections]
    return [USER, *printed_sections, "\n\n# The user's message is: ", message_text(message, index)]


# The prompt of DeepSeek V4, whose repositories ship a Python encoder (`encoding/encoding_dsv4.py`) and no template.
#
# - There is no tool role: tool results are part of the user's turn as `<tool_result>...</tool_result>`, in the order of
#   their calls. Consecutive user and tool messages form one turn, joined by blank lines.
# - `<｜Assistant｜>` is printed behind a user or developer turn. An assistant message elsewhere has none, and a
#   conversation with another end gets no generation prompt.
# - Reasoning before the last user or tool message is dropped, together with whole developer messages, unless tools were
#   declared.
#
# Three things differ on purpose. Arguments given as a dict are printed like the JSON text that they represent, text
# parts of a user are joined by blank lines, and values that the encoder would print as Python, or drop, are refused.


V4_SOURCE = (
    f"DeepSeek V4 prompt encoder: {BOS}system{USER}question<tool_result>result</tool_result>{ASSISTANT}"
    f"{THINK}reasoning{END_THINK}answer\n\n<{DSML}tool_calls>calls</{DSML}tool_calls>{EOS}"
)

# Tokens that request a classification in place of an answer; the field `task` of a message names one.
_TASK_TOKENS = MappingProxyType(
    {name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")}
)

#: The control tokens of this format, of which `<｜latest_reminder｜>` and the task tokens are V4's own.
REQUIRED_TOKENS = (*CONTROL_TOKENS, "<｜latest_reminder｜>", *_TASK_TOKENS.values())

_THOROUGH = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_EXHAUSTIVE = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
    "cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
# One name means different texts in the first checkpoints and in those of 31 July, which have the same tokenizer.
_EFFORT_TEXTS = MappingProxyType(
    {
        "preview": {"high": "", "max": _THOROUGH},
        "0731": {"low": "", "high": _THOROUGH, "max": _EXHAUSTIVE},
    }
)

_V4_TOOLS_HEAD = f"""## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), \
you MUST output your complete reasoning inside {THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""
_V4_TOOLS_TAIL = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


@dataclass(frozen=True, slots=True)
class _Block:
    """The part of a user turn that one message gives; `call_id` is None for a user message."""

    index: int
    text: str
    call_id: str | None


@dataclass(slots=True)
class _Turn:
    """A message, or consecutive user and tool messages with a block for each; index -1 for none."""

    index: int
    role: str
    message: Mapping[str, Any]
    task: str | None
    blocks: list[_Block] = field(default_factory=list)

    @property
    def is_query(self) -> bool:
        return self.role in ("user", "developer")


def deepseek_v4_prompt(
    messages: Messages,
    tools: Tools | None,
    *,
    add_generation_prompt: bool,
    thinking_mode: str = "chat",
    drop_thinking: bool = True,
    reasoning_effort: str | None = None,
    release: str | None = None,
) -> str:
    """Print a conversation for DeepSeek V4.

    `thinking_mode` is "chat" or "thinking"; `drop_thinking` omits reasoning of earlier turns where no tools are
    declared; `reasoning_effort` selects a text at the start in thinking mode, and needs `release` ("preview" or
    "0731"), which decides between the texts of that name. `tools` are added to the system message at the start, or to
    an empty one added there. A message may have the encoder's own fields: `tools` and `response_format` (system and
    developer), `task`, `wo_eos`.
    """
    thinking = check_thinking_mode(thinking_mode)
    effort_text = _effort_text(reasoning_effort, release)
    turns = _turns(with_tools(messages, tools))
    drop = drop_thinking and not any(turn.role != "user" and turn.message.get("tools") for turn in turns)
    if thinking and drop:
        first_kept = _last_query(turns)
        turns = [turn for place, turn in enumerate(turns) if turn.role != "developer" or place >= first_kept]
    last_query = _last_query(turns)

    pieces = [BOS]
    if thinking and turns:
        pieces.append(effort_text)
    for position, turn in enumerate(turns):
        previous = turns[position - 1] if position else None
        following = turns[position + 1] if position + 1 < len(turns) else None
        thinks = thinking and (previous is None or previous.task is None) and (not drop or position > last_query)
        pieces += _printed_turn(turn, thinks)
        if following is None and not add_generation_prompt:
            continue
        if following is None or following.role == "assistant":
            pieces.append(message_mark(None) if following is None else message_mark(following.index))
            opens = thinking and (not drop or position >= last_query)
            pieces.append(_transition(turn, thinking, opens))
    return traced_join("", pieces)


def _effort_text(effort: str | None, release: str | None) -> str:
    if effort is None and release is None:
        return ""
    if release is None or release not in _EFFORT_TEXTS:
        raise PromptRefusedError(
            f"release {release!r}, where an effort means one text in the first checkpoints and another in later ones",
            cure="Set release='preview', or release='0731' where encoding_dsv4.py has the effort 'low'.",
        )
    if effort is None:
        return ""
    if effort not in _EFFORT_TEXTS[release]:
        raise PromptRefusedError(
            f"release {release!r} has no reasoning_effort {effort!r}",
            cure=f"It is None or one of {', '.join(map(repr, _EFFORT_TEXTS[release]))}.",
        )
    return _EFFORT_TEXTS[release][effort]


# Messages into turns.


def _turns(numbered: Sequence[tuple[int, Mapping[str, Any]]]) -> list[_Turn]:
    turns: list[_Turn] = []
    for index, message in numbered:
        role, task = message["role"], message.get("task")
        if role not in ("user", "tool"):
            turns.append(_Turn(index, role, message, task))
            continue
        call_id = message.get("tool_call_id", "") if role == "tool" else None
        last = turns[-1] if turns else None
        if last is None or last.role != "user" or (call_id is None and last.task is not None):
            last = _Turn(index, "user", message, task if call_id is None else None)
            turns.append(last)
        elif task is not None:
            raise PromptRefusedError(
                "a task on a message that continues a turn, where the encoder would drop it",
                cure=f"Put the task on message {last.index}, or combine the messages.",
                message_index=index,
            )
        last.blocks.append(_Block(index, message_text(message, index, between_parts="\n\n"), call_id))
    _sort_results(turns)
    return turns


def _sort_results(turns: Sequence[_Turn]) -> None:
    """Sort tool results into the order of the calls; user messages between them stay in place."""
    place_of: dict[str, int] = {}
    for turn in turns:
        if turn.role == "assistant" and turn.message.get("tool_calls"):
            place_of = {call["id"]: place for place, call in enumerate(turn.message["tool_calls"]) if call.get("id")}
        results = [block for block in turn.blocks if block.call_id is not None]
        # A result without a call is put first, as in the encoder.
        in_order = iter(sorted(results, key=lambda block: place_of.get(block.call_id or "", 0)))
        turn.blocks = [block if block.call_id is None else next(in_order) for block in turn.blocks]


def _last_query(turns: Sequence[_Turn]) -> int:
    return max((position for position, turn in enumerate(turns) if turn.is_query), default=-1)


# Turns into text.


def _printed_turn(turn: _Turn, thinks: bool) -> list[str]:
    pieces: list[str] = []
    if turn.role == "user":
        for number, block in enumerate(turn.blocks):
            pieces += [message_mark(block.index), "\n\n" if number else USER]
            pieces += [block.text] if block.call_id is None else ["<tool_result>", block.text, "</tool_result>"]
        return pieces
    if turn.index >= 0:
        pieces.append(message_mark(turn.index))
    if turn.role == "assistant":
        pieces += assistant_turn(turn.message, turn.index, "tool_calls", thinks=thinks)
        return pieces if turn.message.get("wo_eos") else [*pieces, EOS]
    if turn.role == "developer":
        pieces.append(USER)
    pieces.append(message_text(turn.message, turn.index))
    return pieces + sections(turn.message, _V4_TOOLS_HEAD, _V4_TOOLS_TAIL)


def _transition(turn: _Turn, thinking: bool, opens: bool) -> str:
    """The text between a turn and the assistant's next text; `opens`: that text starts with reasoning."""
    if turn.task is None:
        return ASSISTANT + (THINK if opens else END_THINK) if turn.is_query else ""
    token = _TASK_TOKENS.get(turn.task)
    if token is None:
        raise PromptRefusedError(
            f"unknown task {str.__str__(turn.task)!r}",
            cure=f"A task is one of {', '.join(_TASK_TOKENS)}.",
            message_index=turn.index,
        )
    return token if turn.task != "action" else ASSISTANT + (THINK if thinking else END_THINK) + token


def prompt_for(
    settings: Mapping[str, Any], tokenizer: TemplateTokenizer, *, variables: Mapping[str, Any] | None = None
) -> PythonTemplate | None:
    """The prompt of a model without a chat template, recognised by its control tokens, or None.

    `settings` is the parsed tokenizer_config.json; `variables` are options of the prompt function (`thinking_mode`...);
    `enable_thinking`, the name that other templates have for it, sets `thinking_mode`.
    A model is recognised only if its tokenizer has every control token that the prompt may print and the settings name
    the same first and last token. Settings with a chat template need no prompt function: None.
    """
    if settings.get("chat_template") is not None:
        return None
    for key, expected in (("bos_token", BOS), ("eos_token", EOS)):
        named = settings.get(key)
        if (named.get("content") if isinstance(named, Mapping) else named) not in (None, expected):
            return None
    # A tokenizer with only some tokens of V4 belongs to neither release.
    tokens = {token for token in REQUIRED_TOKENS if tokenizer.control_id(token) is not None}
    prompt: Callable[..., str]
    if tokens == set(REQUIRED_TOKENS):
        prompt, source = deepseek_v4_prompt, V4_SOURCE
    elif tokens == set(CONTROL_TOKENS):
        prompt, source = deepseek_v32_prompt, V32_SOURCE
    else:
        return None
    options = dict(variables or {})
    enabled = options.pop("enable_thinking", None)
    if enabled is not None:
        options.setdefault("thinking_mode", "thinking" if enabled else "chat")
    return PythonTemplate(prompt, source=source, model=tokenizer.model, variables=options)
