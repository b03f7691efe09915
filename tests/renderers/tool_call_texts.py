# ruff: noqa: RUF001, E501  (DeepSeek spells its tokens with a fullwidth bar, which counts as two columns)
"""Texts of tool calls of every syntax with the expected parse, and a parser over a bytewise tokenizer."""

import functools
from typing import Any, NamedTuple

from bytewise import bytewise_tokenizer, ids_of_text

from renderers import ParsedResponse, ParsedToolCall, ToolCallParseStatus
from renderers.formats import by_name
from renderers.parsing.parser import parse_response
from renderers.tokens.tokenizer import TemplateTokenizer

OK = ToolCallParseStatus.OK
INVALID_JSON = ToolCallParseStatus.INVALID_JSON
UNCLOSED_BLOCK = ToolCallParseStatus.UNCLOSED_BLOCK
MISSING_NAME = ToolCallParseStatus.MISSING_NAME
MALFORMED_STRUCTURE = ToolCallParseStatus.MALFORMED_STRUCTURE
UNKNOWN_TOOL = ToolCallParseStatus.UNKNOWN_TOOL
SURPLUS_CALL = ToolCallParseStatus.SURPLUS_CALL
NONCANONICAL = ToolCallParseStatus.NONCANONICAL
#: Control tokens that the tokenizers of each family have.
CONTROL: dict[str, tuple[str, ...]] = {
    "qwen3": ("<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    "glm-4.5": (
        "<|user|>", "<|observation|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
        "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    ),
    "minimax-m2": ("[e~[", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    "minimax-m3": ("[e~[", "]<]minimax[>[", "<mm:think>", "</mm:think>", "<tool_call>", "</tool_call>"),
    "deepseek-v3": (
        "<｜end▁of▁sentence｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    ),
    "deepseek-v4": ("<｜end▁of▁sentence｜>", "<think>", "</think>", "｜DSML｜"),
    "kimi-k2": (
        "<|im_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    ),
    "mistral": ("</s>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    "gemma-4": ("<turn|>", "<|tool_response>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    "lfm2": ("<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    "llama-3.1": ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|python_tag|>"),
    "llama-4-pythonic": ("<|eot|>", "<|eom|>", "<|end_of_text|>"),
}  # fmt: skip
CONTROL["hy3"] = (
    "<｜hy_eos:opensource｜>", "<think:opensource>", "</think:opensource>", "<tool_calls:opensource>",
    "</tool_calls:opensource>", "<tool_call:opensource>", "</tool_call:opensource>", "<tool_sep:opensource>",
    "<arg_key:opensource>", "</arg_key:opensource>", "<arg_value:opensource>", "</arg_value:opensource>",
)  # fmt: skip
CONTROL["qwen3.5"] = CONTROL["qwen3"]
CONTROL["deepseek-v3.1"] = CONTROL["deepseek-v3"]
CONTROL["deepseek-v3.2"] = CONTROL["deepseek-v4"]
LOOK = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"q": {"type": "string"}, "n": {"type": "integer"}, "xs": {"type": "array"}},
    },
}
TOOLS = [{"type": "function", "function": LOOK}]


@functools.cache
def tokenizer_for(name: str, *, textual: bool = False) -> TemplateTokenizer:
    """`textual`: only the stop tokens are tokens, every marker is text."""
    return bytewise_tokenizer(by_name(name).stop_tokens if textual else CONTROL[name])


def parse(name: str, text: str, *, tools: Any = None, stop: bool = True, textual: bool = False) -> ParsedResponse:
    format, tokenizer = by_name(name), tokenizer_for(name, textual=textual)
    ids = ids_of_text(tokenizer, text + (format.stop_tokens[0] if stop else ""))
    parsed = parse_response(ids, format, tokenizer, reasoning_open=False, tools=tools)
    position = 0
    for call in parsed.tool_calls:
        start, end = call.token_span
        assert position <= start < end <= len(ids)
        assert tokenizer.decode(ids[start:end]) == call.raw
        position = end
    return parsed


def parse_single(name: str, text: str, **options: Any) -> ParsedToolCall:
    (call,) = parse(name, text, **options).tool_calls
    return call


class Case(NamedTuple):
    text: str
    status: ToolCallParseStatus
    name: str | None = None
    arguments: dict[str, Any] | str | None = None


def m3(text: str) -> str:
    """Every tag behind MiniMax's namespace token."""
    return text.replace("<", "]<]minimax[>[<")


def hy3(text: str) -> str:
    """A block of calls whose tags end as Hy3 writes them."""
    return f"<tool_calls>{text}</tool_calls>".replace(">", ":opensource>")


def fenced(inner: str) -> str:
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


BLOCKS: dict[str, list[Case]] = {
    "qwen3": [
        Case('<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>', OK, "look", {"n": 1}),
        Case('<tool_call>{"name": "look", "arguments": {"n": 1}, "parameters": {}}</tool_call>', MALFORMED_STRUCTURE, "look",
             {"n": 1}),
        Case('<tool_call>{"name": "look", "arguments": {"n": 1}, "arguments": {}}</tool_call>', INVALID_JSON),
        Case('<tool_call>{"name": "look", "arguments": {"n": NaN}}</tool_call>', INVALID_JSON),
        Case('<tool_call>{"name": "look", "arguments": {"n": 1e999}}</tool_call>', INVALID_JSON),
        Case('<tool_call>{"name": "look\\"", "arguments": {}}</tool_call>', MALFORMED_STRUCTURE),
        Case('<tool_call>[{"name": "look", "arguments": {"n": 1}}</tool_call>', NONCANONICAL, "look", {"n": 1}),
        Case('<tool_call>[{"name": "look", "arguments": {"n": 1}}, ]</tool_call>', NONCANONICAL, "look", {"n": 1}),
        Case('<tool_call>{"name": "look", "arguments": {}}', UNCLOSED_BLOCK, "look", {}),
        Case('<tool_call>{"name": "look", "arguments": {"q": "\\"x </tool_call> <tool_call> y"}}</tool_call>', OK, "look",
             {"q": '"x </tool_call> <tool_call> y'}),
    ],
    "qwen3.5": [
        Case("<tool_call>\n<function=look>\n<parameter=q>\nä\nb\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
             "</function>\n</tool_call>", OK, "look", {"q": "ä\nb", "n": 2}),
        Case("<tool_call><function=look><parameter=n>two</parameter></function></tool_call>", INVALID_JSON, "look",
             {"n": "two"}),
        Case("<tool_call><function=look><parameter=q>x</function></tool_call>", MALFORMED_STRUCTURE, "look",
             {"q": "x"}),
        Case("<tool_call><function=look>junk</function></tool_call>", MALFORMED_STRUCTURE, "look", {}),
        Case("<tool_call><function=look>" + "<parameter=n>\n1\n</parameter>" * 2 + "</function></tool_call>",
             MALFORMED_STRUCTURE, "look", {"n": 1}),
        Case("<tool_call><function=look", UNCLOSED_BLOCK),
        Case("<tool_call><function=></function></tool_call>", MISSING_NAME),
        Case("<tool_call></tool_call>", MALFORMED_STRUCTURE),
        Case("<function=look>\n<parameter=q>\nx\n</parameter>\n</function>", NONCANONICAL, "look", {"q": "x"}),
        Case("<function=look>\n<parameter=q>\nx\n</parameter>\n</function>\n</tool_call>", NONCANONICAL, "look",
             {"q": "x"}),
        Case("<tool_call><function=look><parameter=q>\nval\n<parameter=n>\n5\n</parameter></function></tool_call>",
             MALFORMED_STRUCTURE, "look", {"q": "val", "n": 5}),
        Case('<tool_call><function=look><parameter=xs>\n["</parameter></function></tool_call>"]\n</parameter></function>'
             "</tool_call>", OK, "look", {"xs": ["</parameter></function></tool_call>"]}),
    ],
    "glm-4.5": [
        Case("<tool_call>look\n<arg_key>q</arg_key>\n<arg_value>1</arg_value>\n<arg_key>n</arg_key>\n<arg_value>2"
             "</arg_value>\n</tool_call>", OK, "look", {"q": "1", "n": 2}),
        Case("<tool_call>look<arg_key>n</arg_key><arg_value>x</arg_value></tool_call>", INVALID_JSON, "look",
             {"n": "x"}),
        Case('<tool_call>{"name": "look", "arguments": {"q": "x"}}</tool_call>', MALFORMED_STRUCTURE),
        Case("<tool_call>look" + "<arg_key>n</arg_key><arg_value>1</arg_value>" * 2 + "</tool_call>", MALFORMED_STRUCTURE,
             "look", {"n": 1}),
        Case("<tool_call>look<arg_key>q<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>", MALFORMED_STRUCTURE, "look",
             {"n": 1}),
        Case("<tool_call>look<arg_key>q</arg_key><arg_value>x</tool_call>", MALFORMED_STRUCTURE, "look",
             {"q": "x"}),
        Case("<tool_call><arg_key>q</arg_key><arg_value>x</arg_value></tool_call>", MISSING_NAME),
        Case("<tool_call>look<arg_key>q</arg_key><arg_value>x</arg_value>", UNCLOSED_BLOCK, "look", {"q": "x"}),
        Case("<tool_call>look<arg_key>q</arg_key>\nx</arg_value><arg_key>n</arg_key><arg_value>2</arg_value></tool_call>",
             NONCANONICAL, "look", {"q": "x", "n": 2}),
        Case("<tool_call>look<arg_key>q</arg_key><arg_value>val\n<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>",
             MALFORMED_STRUCTURE, "look", {"q": "val\n", "n": 5}),
        Case("<tool_call>look<arg_key>q</arg_key><arg_value>x </tool_call> y</arg_value></tool_call>", OK, "look",
             {"q": "x </tool_call> y"}),
    ],
    "hy3": [
        Case(hy3("\n<tool_call>look<tool_sep>\n<arg_key>q</arg_key>\n<arg_value>1</arg_value>\n<arg_key>n</arg_key>\n"
                 "<arg_value>2</arg_value>\n</tool_call>\n"), OK, "look", {"q": "1", "n": 2}),
        Case(hy3("<tool_call>look</tool_call>"), MALFORMED_STRUCTURE),
        Case(hy3("<tool_call>look<tool_sep><arg_key>q</arg_key></tool_call>"), MALFORMED_STRUCTURE, "look", {}),
        Case(hy3("<tool_call>look<tool_sep><arg_key>n</arg_key><arg_value>x</arg_value></tool_call>"), INVALID_JSON, "look",
             {"n": "x"}),
        Case(hy3("<tool_call><tool_sep></tool_call>"), MISSING_NAME),
        Case(hy3("<tool_call>look<tool_sep>"), UNCLOSED_BLOCK, "look", {}),
        Case(hy3("<tool_call>look<tool_sep><arg_key>q</arg_key>x</arg_value></tool_call>"), NONCANONICAL, "look", {"q": "x"}),
        Case(hy3("<tool_call>look<tool_sep><arg_key>q</arg_key><arg_value>val<arg_key>n</arg_key><arg_value>5</arg_value>"
                 "</tool_call>"), MALFORMED_STRUCTURE, "look", {"q": "val", "n": 5}),
        Case(hy3("<tool_call>look<tool_sep><arg_key>q</arg_key><arg_value>x</tool_call></tool_calls></arg_value>"
                 "</tool_call>"), OK, "look", {"q": "x</tool_call:opensource></tool_calls:opensource>"}),
    ],
    "minimax-m2": [
        Case('<minimax:tool_call>\n<invoke name="look">\n<parameter name="q">a</parameter>\n<parameter name="xs">[1]'
             "</parameter>\n</invoke>\n</minimax:tool_call>", OK, "look", {"q": "a", "xs": [1]}),
        Case('<minimax:tool_call><invoke name="look"><parameter name="n">x</parameter></invoke></minimax:tool_call>',
             INVALID_JSON, "look", {"n": "x"}),
        Case('<minimax:tool_call><invoke name="look"><parameter name="n">1</invoke></minimax:tool_call>', MALFORMED_STRUCTURE,
             "look", {"n": 1}),
        Case('<minimax:tool_call><invoke name=""></invoke></minimax:tool_call>', MISSING_NAME),
        Case('<minimax:tool_call><invoke name="look">', UNCLOSED_BLOCK, "look", {}),
        Case('<minimax:tool_call><invoke name="look"><parameter name="q">val<parameter name="n">5</parameter></invoke>'
             "</minimax:tool_call>", MALFORMED_STRUCTURE, "look", {"q": "val", "n": 5}),
        Case('<minimax:tool_call><invoke name="look"><parameter name="q">x</invoke></minimax:tool_call></parameter></invoke>'
             "</minimax:tool_call>", OK, "look", {"q": "x</invoke></minimax:tool_call>"}),
    ],
    "minimax-m3": [
        Case(m3('<tool_call>\n<invoke name="look"><q>a</q><n>2</n><xs><item>1</item><item>b</item></xs></invoke>\n'
                "</tool_call>"), OK, "look", {"q": "a", "n": 2, "xs": [1, "b"]}),
        Case(m3('<tool_call><invoke name="look"><n>x</n></invoke></tool_call>'), INVALID_JSON, "look"),
        Case(m3('<tool_call><invoke name="look"><n>1</q></invoke></tool_call>'), MALFORMED_STRUCTURE, "look"),
        Case(m3('<tool_call><invoke name=""></invoke></tool_call>'), MISSING_NAME),
        Case(m3('<tool_call><invoke name="look">' + "<a>" * 99 + "</a>" * 99 + "</invoke></tool_call>"), MALFORMED_STRUCTURE,
             "look"),
        Case(m3('<tool_call><invoke name="look"><q>a'), UNCLOSED_BLOCK, "look"),
        Case(m3('<tool_call><invoke name="look"><q>val<n>5</n></q></invoke></tool_call>'), MALFORMED_STRUCTURE, "look"),
        Case(m3('<tool_call><invoke name="look"><n>5</n><n>6</n></invoke></tool_call>'), MALFORMED_STRUCTURE, "look"),
        Case(m3('<tool_call><invoke name="look"><q>x</tool_call></q></invoke></tool_call>'), OK, "look",
             {"q": "x]<]minimax[>[</tool_call>"}),
    ],
    "deepseek-v3": [
        Case(fenced('<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"q": "a"}\n```<｜tool▁call▁end｜>'), OK,
             "look", {"q": "a"}),
        Case(fenced("<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{q}\n```<｜tool▁call▁end｜>"),
             INVALID_JSON, "look", "{q}"),
        Case(fenced('<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n{"q": "a"}<｜tool▁call▁end｜>'), MALFORMED_STRUCTURE, "look"),
        Case(fenced("<｜tool▁call▁begin｜>function look<｜tool▁call▁end｜>"), MALFORMED_STRUCTURE),
        Case(fenced("<｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json\n{}\n```<｜tool▁call▁end｜>"), MISSING_NAME),
        Case(fenced("look"), MALFORMED_STRUCTURE),
        Case(fenced(""), MALFORMED_STRUCTURE),
        Case("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}", UNCLOSED_BLOCK, "look"),
        Case(fenced('<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"q": "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"}'
                    "\n```<｜tool▁call▁end｜>"), OK, "look", {"q": "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"}),
    ],
    "deepseek-v3.1": [
        Case(fenced('<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"q": "a"}<｜tool▁call▁end｜>'), OK, "look", {"q": "a"}),
        Case(fenced("<｜tool▁call▁begin｜>look<｜tool▁sep｜>{<｜tool▁call▁end｜>"), INVALID_JSON, "look", "{"),
        Case(fenced("<｜tool▁call▁begin｜>look<｜tool▁sep｜>[]<｜tool▁call▁end｜>"), MALFORMED_STRUCTURE, "look"),
        Case(fenced("<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>"), MISSING_NAME),
        Case("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{}", UNCLOSED_BLOCK, "look", {}),
    ],
    "deepseek-v4": [
        Case('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="q" string="true">1'
             '</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
             "</｜DSML｜tool_calls>", OK, "look", {"q": "1", "n": 1}),
        Case('<｜DSML｜tool_calls><｜DSML｜invoke name="look"><｜DSML｜parameter name="n" string="false">x'
             "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>", INVALID_JSON, "look", {"n": "x"}),
        Case('<｜DSML｜tool_calls><｜DSML｜invoke name="look"><｜DSML｜parameter name="n" string="maybe">x'
             "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>", MALFORMED_STRUCTURE, "look", {}),
        Case('<｜DSML｜tool_calls><｜DSML｜invoke name="look">', UNCLOSED_BLOCK, "look", {}),
        Case('<｜DSML｜tool_calls><｜DSML｜invoke name=""></｜DSML｜invoke></｜DSML｜tool_calls>', MISSING_NAME),
        Case('<｜DSML｜tool_calls><｜DSML｜invoke name="look"><｜DSML｜parameter name="q" string="true">val'
             '<｜DSML｜parameter name="n" string="false">5</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>',
             MALFORMED_STRUCTURE, "look", {"q": "val", "n": 5}),
    ],
    "kimi-k2": [
        Case("<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{\"n\": 1}"
             "<|tool_call_end|><|tool_calls_section_end|>", OK, "look", {"n": 1}),
        Case("<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>n"
             "<|tool_call_end|><|tool_calls_section_end|>", INVALID_JSON, "look", "n"),
        Case("<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_end|>"
             "<|tool_calls_section_end|>", MALFORMED_STRUCTURE),
        Case("<|tool_calls_section_begin|><|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}"
             "<|tool_call_end|><|tool_calls_section_end|>", MISSING_NAME),
        Case("<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{}", UNCLOSED_BLOCK,
             "look", {}),
        Case("<|tool_calls_section_begin|>look<|tool_calls_section_end|>", MALFORMED_STRUCTURE),
        Case("<|tool_calls_section_begin|><|tool_call_begin|>jump<|tool_call_argument_begin|>{}<|tool_call_end|>"
             "<|tool_calls_section_end|>", UNKNOWN_TOOL, "jump", {}),
        *(Case(f"<|tool_calls_section_begin|><|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
               "<|tool_calls_section_end|>", NONCANONICAL, "look", {})
          for call_id in ("functionslook5", "functions_look_3", "functions.look", "look:0", "look")),
        Case('<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>'
             '{"q": "<|tool_call_end|><|tool_calls_section_end|>"}<|tool_call_end|><|tool_calls_section_end|>', OK, "look",
             {"q": "<|tool_call_end|><|tool_calls_section_end|>"}),
    ],
    "mistral": [
        Case('[TOOL_CALLS][{"name": "look", "arguments": {"n": 1}, "id": "abcdefghi"}]', OK, "look", {"n": 1}),
        Case('[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"n": 1}', OK, "look", {"n": 1}),
        Case("[TOOL_CALLS]look[ARGS]{", INVALID_JSON, "look", "{"),
        Case("[TOOL_CALLS][ARGS]{}", MISSING_NAME),
        Case("[TOOL_CALLS]look", MALFORMED_STRUCTURE),
        Case('[TOOL_CALLS]look{"n": 1}[ARGS]{"n": 2}', MALFORMED_STRUCTURE),
        Case('[TOOL_CALLS][{"name": "look", "arguments": {"n": 1}}', NONCANONICAL, "look", {"n": 1}),
        Case('[TOOL_CALLS][{"name": ', INVALID_JSON),
        Case('[TOOL_CALLS]look[ARGS]{"q": "[TOOL_CALLS]look[ARGS]"}', OK, "look", {"q": "[TOOL_CALLS]look[ARGS]"}),
    ],
    "gemma-4": [
        Case('<|tool_call>call:look{n:2,q:<|"|>a "b" {,<|"|>,xs:[1,{k:null}]}<tool_call|>', OK, "look",
             {"q": 'a "b" {,', "n": 2, "xs": [1, {"k": None}]}),
        Case("<|tool_call>call:look{n:}<tool_call|>", MALFORMED_STRUCTURE, "look"),
        Case("<|tool_call>call:look{n:1,n:1}<tool_call|>", MALFORMED_STRUCTURE, "look"),
        Case("<|tool_call>call:look{n:1<tool_call|>", MALFORMED_STRUCTURE, "look"),
        Case("<|tool_call>call:look{n:" + "[" * 99 + "]" * 99 + "}<tool_call|>", MALFORMED_STRUCTURE, "look"),
        Case('<|tool_call>{"name": "look"}<tool_call|>', MALFORMED_STRUCTURE),
        Case("<|tool_call>call:{}<tool_call|>", MISSING_NAME),
        Case("<|tool_call>call:look{}", UNCLOSED_BLOCK, "look", {}),
        Case('<|tool_call>call:look{xs:["x", {"k": <|"|>"v"<|"|>}], "q": "a\\n"}<tool_call|>', NONCANONICAL, "look",
             {"xs": ["x", {"k": '"v"'}], "q": "a\n"}),
        Case('<|tool_call>call:look{q:"\\x"}<tool_call|>', MALFORMED_STRUCTURE, "look"),
        Case('<|tool_call>call:look{q:<|"|>x<tool_call|><|"|>}<tool_call|>', OK, "look", {"q": "x<tool_call|>"}),
    ],
    "lfm2": [
        Case("<|tool_call_start|>[look(q='a\\n\"b\"', n=-2, xs=[True, null, 1.5e3])]<|tool_call_end|>", OK, "look",
             {"q": 'a\n"b"', "n": -2, "xs": [True, None, 1500.0]}),
        Case("<|tool_call_start|>[look(q='\\101\\012\\0')]<|tool_call_end|>", OK, "look", {"q": "A\n\0"}),
        Case("<|tool_call_start|>[look(q='\\N{BULLET}')]<|tool_call_end|>", MALFORMED_STRUCTURE),
        Case("<|tool_call_start|>[look(n=1, n=1)]<|tool_call_end|>", MALFORMED_STRUCTURE),
        Case("<|tool_call_start|>[look(n=(1, 2), xs=[(), ((3)), (3,)])]<|tool_call_end|>", OK, "look",
             {"n": [1, 2], "xs": [[], 3, [3]]}),
        Case("<|tool_call_start|>[look(q=__import__('os'))]<|tool_call_end|>", MALFORMED_STRUCTURE),
        Case("<|tool_call_start|>[look('a')]<|tool_call_end|>", MALFORMED_STRUCTURE),
        Case("<|tool_call_start|>[look(n=" + "[" * 9000 + ")]<|tool_call_end|>", MALFORMED_STRUCTURE),
        Case("<|tool_call_start|>[look(q='a", UNCLOSED_BLOCK),
        Case('<|tool_call_start|>[{"name": "look", "arguments": {"n": 1}}]<|tool_call_end|>', NONCANONICAL, "look", {"n": 1}),
        Case("<|tool_call_start|>[look(q='<|tool_call_end|>')]<|tool_call_end|>", OK, "look", {"q": "<|tool_call_end|>"}),
    ],
    "llama-3.1": [
        Case('{"name": "look", "parameters": {"n": 1}}', OK, "look", {"n": 1}),
        Case('{"type": "function", "name": "look", "parameters": {}}', OK, "look", {}),
        Case('{"name": "look", "parameters": {"n": }}', INVALID_JSON),
        Case('{"name": "look", "parameters": [1]}', MALFORMED_STRUCTURE, "look"),
        Case('{"name": "", "parameters": {}}', MISSING_NAME),
        Case('{"name": "jump", "parameters": {}}', UNKNOWN_TOOL, "jump", {}),
        Case('{"name": "look", "arguments": {"n": 1}}', NONCANONICAL, "look", {"n": 1}),
        Case('{"name": "look", "parameters": {"q": "<|python_tag|>; {"}}', OK, "look", {"q": "<|python_tag|>; {"}),
    ],
    "llama-4-pythonic": [
        Case("[look(n=1)]", OK, "look", {"n": 1}),
        Case("[look(n=x)]", MALFORMED_STRUCTURE),
    ],
}  # fmt: skip
