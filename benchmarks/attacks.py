# ruff: noqa: RUF001, E501  (DeepSeek spells its tokens with a fullwidth bar, which counts as two columns)
"""Inputs of strangers that are made to take long: twice the size is to take twice the time and memory.

    python benchmarks/attacks.py [--check] [ATTACK...]

An attack is a file of media, a completion, the answer of a judge, a page or a refusal of a server, a template, a text
of a user, a trajectory, a message of another process, a result of a tool, or a run's file. Each is met at n and at 2n,
in a process of its own: processor seconds, and the growth of the peak resident set. `--check` fails where twice the
size takes more than three times the time. Linux only. `tests/test_attacks.py` meets the same attacks at small sizes.
"""

import argparse
import io
import json
import resource
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "renderers"))

from bytewise import bytewise_tokenizer, ids_of_text
from loaded import renderer_of
from tool_call_texts import CONTROL

from renderers import MediaPolicy, MediaSource
from renderers.errors import RendererError
from renderers.formats import by_name
from renderers.media.audio_decoding import decode_audio
from renderers.media.decoding import decode_image
from renderers.parsing.parser import parse_response
from renderers.template.chat_template import ChatTemplate
from renderers.tokens.encoding import encode_printed, find_controls
from renderers.tokens.tokenizer import TemplateTokenizer
from rollouts.engines.chat_completions import overflow_in
from rollouts.engines.http.metrics import Metrics
from rollouts.environments.mcp.tools import result_content
from rollouts.errors import RolloutsError
from rollouts.judge.answer import answer_reader
from rollouts.run_config.config_file import read_config
from rollouts.trajectory_files import _unbounded_value
from transport import decode, encode

Call = Callable[[], object]
#: Times the size of the tests.
SCALE = 8
MOST_GROWTH = 3.0
TOO_SHORT = 0.02  # processor seconds, of which no growth is told
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
_POLICY = MediaPolicy(max_bytes=2**30)
_QUESTION = {"role": "user", "content": "question"}


class Attack(NamedTuple):
    """`prepare(size)` gives the call that is measured; `size` is the number of bytes or tokens that are sent."""

    size: int
    prepare: Callable[[int], Call]


def repeated(piece: Any, size: int) -> Any:
    return piece * (size // len(piece))


def refused(call: Call) -> Call:
    """The call, whose errors are as good as a result."""

    def attempt() -> None:
        with suppress(RendererError, RolloutsError, ValueError):
            call()

    return attempt


def sound(piece: bytes, before: bytes = b"") -> Callable[[int], Call]:
    def prepare(size: int) -> Call:
        source = MediaSource.of(before + repeated(piece, size))
        return refused(lambda: decode_audio(source, _POLICY, 16000))

    return prepare


def image(format: str, behind: bytes, shift: int, piece: bytes) -> Callable[[int], Call]:
    """An image file with the pieces `shift` bytes before the first `behind`."""

    def prepare(size: int) -> Call:
        buffer = io.BytesIO()
        Image.new("RGB", (8, 8)).save(buffer, format)
        data = buffer.getvalue()
        at = data.index(behind) - shift
        source = MediaSource.of(data[:at] + repeated(piece, size) + data[at:])
        return refused(lambda: decode_image(source, _POLICY))

    return prepare


def completion(family: str, piece: str, before: str = "", behind: str = "") -> Callable[[int], Call]:
    def prepare(size: int) -> Call:
        format = by_name(family)
        tokenizer = bytewise_tokenizer(CONTROL.get(family, _HARMONY))
        ids = ids_of_text(tokenizer, before + repeated(piece, size) + behind + format.stop_tokens[0])
        return lambda: parse_response(ids, format, tokenizer, reasoning_open=False)

    return prepare


def broken_bytes(size: int) -> Call:
    format = by_name("qwen3")
    tokenizer = bytewise_tokenizer(format.stop_tokens)
    (byte,) = tokenizer.encode_run("é").ids[1:]  # the second byte of a character, again and again
    return lambda: parse_response([byte] * size, format, tokenizer, reasoning_open=False)


def answer(size: int) -> Call:
    read = answer_reader({"good": 1.0, "bad": 0.0}, None)
    return refused(lambda: read("```" + "\n" * size + "x"))


def metrics(line: str, piece: str) -> Callable[[int], Call]:
    return lambda size: refused(lambda: Metrics.parse(line.replace("*", repeated(piece, size))))


def stripping_tokens(size: int) -> Call:
    """A prompt full of tokens that take the white space behind them."""
    tokens = [{"id": 256, "content": "<|end|>", "special": True, "rstrip": True}]
    definition = json.loads(bytewise_tokenizer(()).body.to_str())
    tokenizer = TemplateTokenizer({**definition, "added_tokens": tokens}, model="attacked")
    source = "{% for message in messages %}{{ message.content }}{% endfor %}"
    printed = ChatTemplate(source, model="attacked").print(
        [{"role": "assistant", "content": repeated("<|end|>", size)}]
    )
    return lambda: encode_printed(printed.text, find_controls(printed, tokenizer, ["assistant"]), tokenizer)


def template(size: int) -> Call:
    source = f"{{{{ '{repeated('%(', size)}' % {{}} }}}}"
    return refused(lambda: ChatTemplate(source, model="attacked").print([{"role": "user", "content": "Q"}]))


def conversation(template: str) -> Callable[[int], Call]:
    """A conversation of many turns, with another end for each size, so that no cache has it."""

    def prepare(size: int) -> Call:
        renderer, turns = renderer_of(template), [_QUESTION, {"role": "assistant", "content": "answer"}] * (size // 64)
        renderer.render(turns[:2])  # compiles the template
        return lambda: renderer.render([*turns, {"role": "user", "content": f"{size}"}], add_generation_prompt=True)

    return prepare


def trajectory(size: int) -> Call:
    """Nodes that share one list of messages, which a file has once."""
    shared = [{"role": index} for index in range(size // 32)]
    nodes = [SimpleNamespace(messages=shared, extras={}) for _ in range(size // 320)]
    held: Any = SimpleNamespace(nodes=nodes, turns=[], metrics={}, provenance={})
    return lambda: _unbounded_value(held)


def toml(size: int) -> Call:
    file = Path(tempfile.mkdtemp()) / "run.toml"
    file.write_text("\n".join(f"key_{index} = {index}" for index in range(size // 15)))
    return refused(lambda: read_config(file))


def message(size: int) -> Call:
    data = encode([(index,) for index in range(size // 8)])
    return lambda: decode(data)


def tool_result(size: int) -> Call:
    block = SimpleNamespace(type="text", text="line")
    result = SimpleNamespace(content=[block] * (size // 16), structured_content=None)
    return lambda: result_content("server", "tool", result)


_K = 1000
ATTACKS: dict[str, Attack] = {
    "MP3 of empty tags": Attack(300 * _K, sound(b"ID3\4\0\0\0\0\0\0")),
    "Ogg of empty pages": Attack(2000 * _K, sound(b"OggS\0\4" + bytes(21))),
    "WAV of empty chunks": Attack(400 * _K, sound(b"abcd\0\0\0\0", b"RIFF\xff\xff\xff\xffWAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16))),
    "MP4 of empty boxes": Attack(200 * _K, sound(b"\0\0\0\x08free", b"\0\0\0\x10ftypM4A \0\0\0\0")),
    "JPEG of Exif segments": Attack(1000 * _K, image("JPEG", b"\xff\xe0", 0, b"\xff\xe1\0\x1aExif\0\0" + bytes(18))),
    "JPEG of comments": Attack(50 * _K, image("JPEG", b"\xff\xe0", 0, b"\xff\xfe\0\x02")),
    "PNG of texts": Attack(100 * _K, image("PNG", b"IDAT", 4, b"\0\0\0\3tEXta\0b" + struct.pack(">I", zlib.crc32(b"tEXta\0b")))),
    "GIF of comments": Attack(20 * _K, image("GIF", b",", 0, b"!\xfe\1a\0")),
    "judge: line breaks": Attack(2 * _K, answer),
    "Kimi: digits": Attack(10 * _K, completion("kimi-k2", "1", "<|tool_calls_section_begin|><|tool_call_begin|>", "x<|tool_call_argument_begin|>")),
    "Kimi: escaped quotes": Attack(20 * _K, completion("kimi-k2", r"\"", '<|tool_calls_section_begin|><|tool_call_begin|>"')),
    "Kimi: calls in strings": Attack(20 * _K, completion("kimi-k2", r'<|tool_call_begin|>"\"', "<|tool_calls_section_begin|>")),
    "DeepSeek: calls in strings": Attack(20 * _K, completion("deepseek-v3", r'<｜tool▁call▁begin｜>"\"', "<｜tool▁calls▁begin｜>")),
    "Hermes: blocks in strings": Attack(10 * _K, completion("qwen3", r'<tool_call>"\"</tool_call>')),
    "harmony: messages in strings": Attack(10 * _K, completion("gpt-oss", r'<|start|>assistant to=functions.f<|message|>"\"<|end|>')),
    "Mistral: lists in strings": Attack(20 * _K, completion("mistral", r'[TOOL_CALLS][{"\"')),
    "Llama: escaped quotes": Attack(20 * _K, completion("llama-3.1", r"\"", '<|python_tag|>"')),
    "GLM: JSON without its end": Attack(40 * _K, completion("glm-4.5", r'<arg_key>a</arg_key><arg_value>{"\"</arg_value>', "<tool_call>f")),
    "Hy3: calls in strings": Attack(40 * _K, completion("hy3", r'<tool_call:opensource>f<tool_sep:opensource><arg_key:opensource>a</arg_key:opensource><arg_value:opensource>{"\"', "<tool_calls:opensource>")),
    "Qwen: functions in JSON": Attack(20 * _K, completion("qwen3.5", r'<function=f><parameter=a>{"\"', "<tool_call>")),
    "Qwen: texts like JSON": Attack(40 * _K, completion("qwen3.5", r'<tool_call><function=f><parameter=a>{\"</parameter></function></tool_call>')),
    "Qwen: such texts without a block": Attack(40 * _K, completion("qwen3.5", r'<function=f><parameter=a>{\"</parameter></function>')),
    "Qwen: functions begun": Attack(40 * _K, completion("qwen3.5", "<function=f>")),
    "MiniMax M2: calls in JSON": Attack(20 * _K, completion("minimax-m2", r'<invoke name="f"><parameter name="a">{"\"', "<minimax:tool_call>")),
    "MiniMax M3: elements begun": Attack(40 * _K, completion("minimax-m3", "]<]minimax[>[<a>", "]<]minimax[>[<tool_call>]<]minimax[>[<invoke ")),
    "bytes that are not UTF-8": Attack(100 * _K, broken_bytes),
    "metrics: letters": Attack(20 * _K, metrics("a{*} 1", "a")),
    "metrics: spaces": Attack(5 * _K, metrics("a*b c", " ")),
    "refusal of digits": Attack(20 * _K, lambda size: lambda: overflow_in(400, None, "context length " + "1" * size)),
    "control tokens in a text": Attack(100 * _K, stripping_tokens),
    "template: keys without end": Attack(40 * _K, template),
    "turns of Qwen3": Attack(100 * _K, conversation("trl/qwen3")),
    "turns of gpt-oss": Attack(100 * _K, conversation("trl/gptoss")),
    "nodes of one list": Attack(100 * _K, trajectory),
    "TOML of unknown keys": Attack(10 * _K, toml),
    "message of tuples": Attack(200 * _K, message),
    "tool result of texts": Attack(1000 * _K, tool_result),
}  # fmt: skip


class Measured(NamedTuple):
    """Processor seconds, and megabytes by which the peak of the process grew."""

    seconds: float
    megabytes: float


def measured(name: str, size: int) -> Measured:
    """What the attack takes in this process."""
    call = ATTACKS[name].prepare(size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    call()
    seconds = time.process_time() - started
    return Measured(seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def measured_in_process(name: str, size: int) -> Measured:
    command = [sys.executable, __file__, name, "--size", str(size)]
    return Measured(*json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("attacks", nargs="*", metavar="ATTACK")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.size:
        print(json.dumps(measured(options.attacks[0], options.size)))
        return 0
    print(f"{'attack':30} {'size n':>10} {'s at n':>8} {'s at 2n':>8} {'ratio':>6} {'MB at n':>8} {'MB at 2n':>8}")
    missed = []
    for name in options.attacks or ATTACKS:
        size = SCALE * ATTACKS[name].size
        once, twice = measured_in_process(name, size), measured_in_process(name, 2 * size)
        growth = twice.seconds / max(once.seconds, 1e-6)
        is_short = twice.seconds < TOO_SHORT
        missed += [name] if growth > MOST_GROWTH and not is_short else []
        shown = "-" if is_short else f"{growth:.2f}"
        print(
            f"{name:30} {size:>10} {once.seconds:>8.3f} {twice.seconds:>8.3f} {shown:>6} {once.megabytes:>8.1f} "
            f"{twice.megabytes:>8.1f}",
            flush=True,
        )
    if options.check and missed:
        print(f"more than {MOST_GROWTH:g} times the time for twice the size: {', '.join(missed)}")
    return int(options.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
