"""Looks for bytes on which decoding does anything but return a value or raise an error of `transport`.

    python tests/fuzz_decode.py [SECONDS [SEED]]

Coverage-guided, by atheris (https://github.com/google/atheris); 30 seconds and a random seed unless told. Ends with
status 0 if nothing was found or atheris is not installed, which it then says, and with another if an input made
trouble, which lies in the current directory then. Not a module of the test suite: atheris takes over the process it
runs in.
"""

import contextlib
import datetime
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

try:
    import atheris
except ImportError:
    sys.exit(print("atheris is not installed, so nothing was fuzzed. pip install atheris"))

with atheris.instrument_imports(include=["transport"]):
    import transport
    from transport import RecordReader, RecordWriter
    from transport.inline_arrays import walk_decode_tensors, walk_encode_tensors

from renderers.media.item import MediaSource

LIMITS = transport.DecodeLimits(max_header_bytes=1 << 20, max_total_bytes=1 << 20)
FRAMES, CONTAINER, TREE, FILE = range(4)
_LENGTH = struct.Struct("<H")


def samples() -> list[Any]:
    zone = datetime.timezone(datetime.timedelta(hours=2), "here")
    return [
        {"a": [1, 2.5, None, True, "é"], 3: (b"x", {1, "x"}), "media": MediaSource.of(b"image")},
        [np.arange(6, dtype=">i4").reshape(2, 3), np.zeros(600), np.zeros(2, "U2"), np.float32(1)],
        [2**70, datetime.datetime(2024, 1, 2, tzinfo=zone), datetime.timedelta(1)],
        [transport.RawTensor("bfloat16", (2,), np.zeros(4, np.uint8)), datetime.date(2024, 2, 29), datetime.time(1)],
    ]


def seeds(scratch: Path) -> list[bytes]:
    """What each way of decoding reads when it goes well, behind the byte that chooses it."""
    found = []
    for number, sample in enumerate(samples()):
        frames = b"".join(_LENGTH.pack(len(bytes(f))) + bytes(f) for f in transport.encode_frames(sample))
        path = scratch / f"{number}.mmr"
        with RecordWriter(path) as out:
            out.append(sample)
        found += [bytes([FRAMES]) + frames, bytes([CONTAINER]) + transport.encode(sample)]
        found.append(bytes([FILE]) + path.read_bytes())
    tree = {"a": np.arange(3.0), "b": [{"c": np.zeros((0, 2), bool)}]}
    found.append(bytes([TREE]) + msgpack.packb(walk_encode_tensors(tree)))
    return found


def read_frames(data: bytes) -> None:
    frames = []
    while len(data) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(data)
        frames.append(data[_LENGTH.size : _LENGTH.size + length])
        data = data[_LENGTH.size + length :]
    transport.decode_frames(frames, limits=LIMITS)


def read_tree(data: bytes) -> None:
    try:
        tree = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
        return
    walk_decode_tensors(tree)


def read_file(data: bytes, path: Path) -> None:
    path.write_bytes(data)
    with RecordReader(path, limits=LIMITS) as reader:
        for index in range(len(reader)):
            with contextlib.suppress(transport.TransportError):
                reader[index]


def main() -> None:
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0  # atheris takes 0 as "a random one"
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        corpus = scratch / "corpus"
        corpus.mkdir()
        for number, example in enumerate(seeds(scratch)):
            (corpus / str(number)).write_bytes(example)

        def one_input(data: bytes) -> None:
            way, body = data[:1], data[1:]
            with contextlib.suppress(transport.TransportError):
                if way == bytes([CONTAINER]):
                    transport.decode(body, limits=LIMITS)
                elif way == bytes([TREE]):
                    read_tree(body)
                elif way == bytes([FILE]):
                    read_file(body, scratch / "fuzzed.mmr")
                else:
                    read_frames(body)

        # The timeout of an input is long, so that a loaded machine reports none.
        limits = [f"-max_total_time={seconds}", f"-seed={seed}", "-timeout=60", "-rss_limit_mb=2048", "-max_len=4096"]
        atheris.Setup([sys.argv[0], *limits, "-print_final_stats=1", str(corpus)], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
