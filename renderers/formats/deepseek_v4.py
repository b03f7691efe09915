# ruff: noqa: RUF001, RUF002, RUF003  (DeepSeek spells its tokens with a fullwidth bar)
"""The prompt of DeepSeek V4, whose repositories ship a Python encoder (`encoding/encoding_dsv4.py`) and no template.

- There is no tool role: tool results are part of the user's turn as `<tool_result>...</tool_result>`, in the order of
  their calls. Consecutive user and tool messages form one turn, joined by blank lines.
- `<｜Assistant｜>` is printed behind a user or developer turn. An assistant message elsewhere has none, and a
  conversation with another end gets no generation prompt.
- Reasoning before the last user or tool message is dropped, together with whole developer messages, unless tools were
  declared.

Three things differ on purpose. Arguments given as a dict are printed like the JSON text that they represent, text
parts of a user are joined by blank lines, and values that the encoder would print as Python, or drop, are refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from renderers.errors import TemplateError
from renderers.formats.deepseek_dsml import (
    ASSISTANT,
    BOS,
    CONTROL_TOKENS,
    DSML,
    END_THINK,
    EOS,
    THINK,
    USER,
    assistant_turn,
    check_thinking_mode,
    message_text,
    sections,
    with_tools,
)
from renderers.template.chat_template import Messages, Tools
from renderers.template.python_template import message_mark
from renderers.template.traced import traced_join

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

_TOOLS_HEAD = f"""## Tools

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
_TOOLS_TAIL = """

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
        raise TemplateError(
            f"release {release!r}, where an effort means one text in the first checkpoints and another in later ones",
            cure="Set release='preview', or release='0731' where encoding_dsv4.py has the effort 'low'.",
        )
    if effort is None:
        return ""
    if effort not in _EFFORT_TEXTS[release]:
        raise TemplateError(
            f"release {release!r} has no reasoning_effort {effort!r}",
            cure=f"It is None or one of {', '.join(map(repr, _EFFORT_TEXTS[release]))}.",
        )
    return _EFFORT_TEXTS[release][effort]


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
            raise TemplateError(
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
    return pieces + sections(turn.message, _TOOLS_HEAD, _TOOLS_TAIL)


def _transition(turn: _Turn, thinking: bool, opens: bool) -> str:
    """The text between a turn and the assistant's next text; `opens`: that text starts with reasoning."""
    if turn.task is None:
        return ASSISTANT + (THINK if opens else END_THINK) if turn.is_query else ""
    token = _TASK_TOKENS.get(turn.task)
    if token is None:
        raise TemplateError(
            f"unknown task {str.__str__(turn.task)!r}",
            cure=f"A task is one of {', '.join(_TASK_TOKENS)}.",
            message_index=turn.index,
        )
    return token if turn.task != "action" else ASSISTANT + (THINK if thinking else END_THINK) + token
