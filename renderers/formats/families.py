# ruff: noqa: RUF001  (DeepSeek spells its tokens with a fullwidth bar)
"""The known model families: the name and format of each, and how its models are recognised."""

from dataclasses import dataclass

from renderers.errors import LoadError
from renderers.parsing.format import Format, MessageChannels, ReasoningMarkers
from renderers.parsing.syntaxes.element_calls import GlmCalls, Hy3Calls, InvokeCalls, MiniMaxM3Calls, QwenXmlCalls
from renderers.parsing.syntaxes.json_calls import DeepSeekCalls, JsonCalls, KimiCalls, MistralCalls
from renderers.parsing.syntaxes.literal_calls import GemmaCalls, LlamaCalls, PythonicCalls


@dataclass(frozen=True, slots=True)
class Family:
    """`tokens` are tokens that the tokenizer must have, `source` texts of the template.

    If the format has tool calls, the template must also print a call that the format parses.
    """

    format: Format
    tokens: tuple[str, ...] = ()
    source: tuple[str, ...] = ()


_CHATML_STOPS = ("<|im_end|>",)
_THINK = ("<think>", "</think>")
_DEEPSEEK_STOPS = ("<｜end▁of▁sentence｜>",)
_DEEPSEEK_TOKENS = ("<｜User｜>", "<｜Assistant｜>")
# Nothing closes a turn of GLM, so the stops are the tokens of the roles that may come next.
_GLM_STOPS = ("<|user|>", "<|observation|>", "<|endoftext|>")
_GLM_TOKENS = ("[gMASK]", "<|assistant|>")
_LLAMA3_STOPS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_LLAMA4_STOPS = ("<|eot|>", "<|eom|>", "<|end_of_text|>")


def _dsml(block: str) -> InvokeCalls:
    tags = tuple(f"{slash}｜DSML｜{name}" for name in ("invoke", "parameter") for slash in ("<", "</"))
    bare = ('<｜DSML｜invoke name="', "</｜DSML｜invoke>")
    return InvokeCalls((f"<｜DSML｜{block}>",), (f"</｜DSML｜{block}>",), tags, bare_calls=bare)


#: Families with tool calls come first, because the template must print a call that they parse; of those that parse the
#: same calls, the one with more conditions comes first.
FAMILIES: tuple[Family, ...] = (
    # Harmony: a turn of several messages on channels.
    Family(
        Format(
            "gpt-oss",
            # Sampled at the end of an answer, and at the end of a call.
            ("<|return|>", "<|call|>"),
            ReasoningMarkers("<|channel|>analysis<|message|>", "<|end|>"),
            channels=MessageChannels(),
            history_ends=("<|end|>",),
        ),
        tokens=("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
    ),
    Family(
        Format(
            "gemma-4",
            # The model stops where it wants the answer to its calls.
            ("<turn|>", "<|tool_response>"),
            ReasoningMarkers("<|channel>", "<channel|>", label="thought"),
            GemmaCalls(),
        ),
        tokens=("<|turn>", "<|tool_call>"),
    ),
    # Kimi K2 and K2.5, whose template prints the id of a call where others print its name.
    Family(
        Format("kimi-k2", _CHATML_STOPS, ReasoningMarkers(), KimiCalls(), call_id="functions.{name}:{index}"),
        tokens=("<|im_assistant|>", "<|im_middle|>"),
    ),
    Family(
        Format("minimax-m3", ("[e~[",), ReasoningMarkers("<mm:think>", "</mm:think>"), MiniMaxM3Calls()),
        tokens=("]~b]", "]<]minimax[>["),
    ),
    Family(Format("minimax-m2", ("[e~[",), ReasoningMarkers(), InvokeCalls()), tokens=("]~b]",)),
    Family(
        Format("deepseek-v4", _DEEPSEEK_STOPS, ReasoningMarkers(), _dsml("tool_calls")),
        tokens=(*_DEEPSEEK_TOKENS, "｜DSML｜"),
    ),
    Family(
        Format("deepseek-v3.2", _DEEPSEEK_STOPS, ReasoningMarkers(), _dsml("function_calls")),
        tokens=(*_DEEPSEEK_TOKENS, "｜DSML｜"),
    ),
    Family(
        Format("deepseek-v3.1", _DEEPSEEK_STOPS, ReasoningMarkers(), DeepSeekCalls(fenced=False), arguments="json"),
        tokens=_DEEPSEEK_TOKENS,
    ),
    Family(
        Format("deepseek-v3", _DEEPSEEK_STOPS, ReasoningMarkers(), DeepSeekCalls(), arguments="json"),
        tokens=_DEEPSEEK_TOKENS,
    ),
    # GLM 4.5 and 4.6 write each part of a turn on a line of its own, GLM 4.7 and 5 do not.
    Family(
        Format("glm-4.5", _GLM_STOPS, ReasoningMarkers(), GlmCalls()), tokens=_GLM_TOKENS, source=(r"'\n<tool_call>'",)
    ),
    Family(
        Format("laguna", ("</assistant>",), ReasoningMarkers(), GlmCalls(), trailing_newlines="\n"),
        tokens=("<assistant>", "<tool_call>"),
    ),
    Family(
        Format(
            "hy3",
            ("<｜hy_eos:opensource｜>",),
            ReasoningMarkers("<think:opensource>", "</think:opensource>"),
            Hy3Calls(),
        ),
        tokens=("<｜hy_Assistant:opensource｜>", "<tool_calls:opensource>"),
    ),
    Family(Format("glm-5", _GLM_STOPS, ReasoningMarkers(), GlmCalls()), tokens=_GLM_TOKENS),
    Family(
        Format("nemotron-3", _CHATML_STOPS, ReasoningMarkers(), QwenXmlCalls()), source=("truncate_history_thinking",)
    ),
    Family(
        Format("qwen3.5", _CHATML_STOPS, ReasoningMarkers(), QwenXmlCalls()),
        tokens=_THINK,
        source=("reasoning_content",),
    ),
    Family(Format("qwen3-coder", _CHATML_STOPS, ReasoningMarkers(), QwenXmlCalls())),
    Family(
        Format(
            "lfm2",
            _CHATML_STOPS,
            ReasoningMarkers(),
            PythonicCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",), unmarked_starts=""),
        ),
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    # Mistral's templates insist on ids of nine letters and digits.
    Family(
        Format(
            "mistral", ("</s>",), ReasoningMarkers("[THINK]", "[/THINK]"), MistralCalls(), call_id="call0000{index}"
        ),
        tokens=("[TOOL_CALLS]",),
    ),
    Family(
        Format(
            "phi-4-mini",
            ("<|end|>",),
            tool_calls=JsonCalls(("<|tool_call|>",), ("<|/tool_call|>",), unmarked_starts=("functools[",)),
        ),
        tokens=("<|tool_call|>", "<|/tool_call|>"),
    ),
    Family(Format("llama-3.1", _LLAMA3_STOPS, tool_calls=LlamaCalls()), tokens=("<|start_header_id|>",)),
    Family(
        Format("llama-4", _LLAMA4_STOPS, tool_calls=LlamaCalls(("<|python_start|>",))), tokens=("<|header_start|>",)
    ),
    Family(Format("llama-4-pythonic", _LLAMA4_STOPS, tool_calls=PythonicCalls()), tokens=("<|header_start|>",)),
    Family(Format("qwen3", _CHATML_STOPS, ReasoningMarkers(), JsonCalls()), tokens=("<tool_call>", *_THINK)),
    # ChatML with Hermes tool calls.
    Family(Format("hermes", _CHATML_STOPS, ReasoningMarkers(), JsonCalls())),
    Family(Format("gemma-3", ("<end_of_turn>",)), tokens=("<start_of_turn>",)),
    # GLM-4 and GLM-Z1 of 2024 and 2025, whose templates show no calls.
    Family(Format("glm-4", _GLM_STOPS, ReasoningMarkers()), tokens=_GLM_TOKENS),
    # Templates that show no calls: V2.5, the first V3, the distilled R1.
    Family(Format("deepseek", _DEEPSEEK_STOPS, ReasoningMarkers()), tokens=_DEEPSEEK_TOKENS),
    Family(Format("llama-3", _LLAMA3_STOPS), tokens=("<|start_header_id|>",)),
    # Qwen2-VL and Qwen2.5-VL, whose templates show images and no tools.
    Family(
        Format("qwen-vl", _CHATML_STOPS), tokens=("<|vision_start|>", "<|image_pad|>"), source=("<|vision_start|>",)
    ),
    Family(Format("chatml", _CHATML_STOPS, ReasoningMarkers())),
)


def names() -> tuple[str, ...]:
    """The names that `by_name` accepts."""
    return tuple(family.format.name for family in FAMILIES)


def by_name(name: str) -> Format:
    """The format of a family. Raises `LoadError`, which lists the names.

    Where the templates of a family differ (whether the prompt opens reasoning, the form of arguments), the format has
    the most frequent variant; `detect_format` reads it from the template.
    """
    for family in FAMILIES:
        if family.format.name == name:
            return family.format
    raise LoadError(
        f"no format {name!r}; there are {', '.join(sorted(names()))}. Pass one of them, or a Format of your own"
    )
