"""The prompt of DeepSeek V3.2, whose repositories ship a Python encoder (`encoding/encoding_dsv32.py`) and no template.

A result names no call, so there must be one result for each call, in the order of the calls; anything else is
refused, and so are values that the encoder would print as Python (`None`, a list). Reasoning is printed only behind
the last user or developer message. Two limits of the encoder do not apply here: in thinking mode an assistant message
may lack reasoning, because a model may sample none, and a developer message may precede the last question.

Sources: the encoder as copied by vLLM and SGLang, and the vendor's expected output, from which the blank lines of the
preamble come (both copies lost them).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from renderers.errors import TemplateError
from renderers.formats.deepseek_dsml import (
    ASSISTANT,
    BOS,
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

V32_SOURCE = (
    f"DeepSeek V3.2 prompt encoder: {BOS}system{USER}question{ASSISTANT}{THINK}reasoning{END_THINK}answer\n\n"
    f"<{DSML}function_calls>calls</{DSML}function_calls>{EOS}\n\n"
    "<function_results>\n<result>result</result>\n</function_results>"
)

_TOOLS_HEAD = f"""## Tools

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
            raise TemplateError(
                "a result without a call", cure="Put it behind the assistant message that calls.", message_index=index
            )
        call_id, expected = message.get("tool_call_id"), self.calls[self.count].get("id")
        ids = [call.get("id") for call in self.calls]
        if call_id is not None and expected is not None and call_id != expected and call_id in ids:
            raise TemplateError(
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
            raise TemplateError(
                f"{len(self.calls)} calls but {self.count} results, whose block the encoder would leave open",
                cure="Give one result for each call.",
                message_index=self.index,
            )


def _printed_text(message: Mapping[str, Any], index: int) -> list[str]:
    if message["role"] == "user":
        return [USER, message_text(message, index)]
    printed_sections = sections(message, _TOOLS_HEAD, "\n</functions>\n")
    if message["role"] == "system":
        return [message_text(message, index), *printed_sections]
    return [USER, *printed_sections, "\n\n# The user's message is: ", message_text(message, index)]
