"""Messages of the Tinker API as arrays, and results as messages. Their types are those of the package `tinker`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as messages

from rollouts.engines.protocol import TopLogprobs
from rollouts.serve.errors import RequestError
from rollouts.tinker.requests import Chunk, ImageChunk, ImagePointerChunk, SampleResult, TextChunk

#: The content type of the messages, in both directions.
PROTOBUF: Final = "application/x-protobuf"

_DTYPES: Final[Mapping[int, str]] = {
    messages.DTYPE_FLOAT32: "<f4",
    messages.DTYPE_INT64: "<i8",
    messages.DTYPE_INT32: "<i4",
}
_STOP: Final = {True: messages.STOP_REASON_STOP, False: messages.STOP_REASON_LENGTH}


class Row(NamedTuple):
    """A datum: the chunks of its input, and the inputs of the loss by name, `target_tokens` among them."""

    chunks: Sequence[Chunk]
    inputs: Mapping[str, np.ndarray]


class TrainRequest(NamedTuple):
    """Rows for a loss of a model. `options` are the numbers of the loss; `seq_id` counts the requests of the model.

    `problem`: why the rows cannot be read; then there are none.
    """

    model_id: str
    seq_id: int
    loss: str
    options: Mapping[str, float | str]
    forward_only: bool
    rows: Sequence[Row]
    problem: RequestError | None = None


def decompressed(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """A body without its `Content-Encoding`. Raises `RequestError` for another one than zstd, and for a larger body."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise RequestError(415, f"the content encoding {encoding[:40]!r} is not known; send zstd, or none")
    try:
        size = zstandard.frame_content_size(body)  # -1: it does not say
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body) as reader:
            data: bytes = reader.read(max_bytes + 1)
    except zstandard.ZstdError as error:
        raise RequestError(400, f"the body is not zstd: {error}") from error
    if len(data) > max_bytes:
        raise RequestError(413, f"the body has more than {max_bytes} bytes; send fewer rows a request")
    if size not in (-1, len(data)):
        raise RequestError(400, f"the body is cut off: it has {len(data)} of {size} bytes; send it again")
    return data


def read_train_request(body: bytes) -> TrainRequest:
    """The request of a protobuf body. Raises `RequestError` (400) for a body that is no such message."""
    message = messages.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RequestError(400, f"the body is no ForwardBackwardRequest: {error}") from error
    options: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        options[name] = value.text if value.WhichOneof("value") == "text" else value.number
    fields = (message.model_id, message.seq_id, message.loss_fn, options, message.forward_only)
    try:
        return TrainRequest(*fields, [_row(f"data[{number}]", datum) for number, datum in enumerate(message.data)])
    except RequestError as error:
        return TrainRequest(*fields, [], error)


def _row(place: str, datum: Any) -> Row:
    return Row(
        [_chunk(f"{place}.model_input[{number}]", chunk) for number, chunk in enumerate(datum.model_input)],
        {name: _array(f"{place}.{name}", tensor) for name, tensor in datum.loss_fn_inputs.items()},
    )


def chunks_of_json(place: str, chunks: Iterable[Any]) -> list[Chunk]:
    """The chunks of a prompt, which is JSON: objects of the types of `tinker`. Raises `RequestError` (400)."""
    found: list[Chunk] = []
    for number, chunk in enumerate(chunks):
        if chunk.type == "encoded_text":
            try:
                found.append(TextChunk(np.asarray(chunk.tokens, np.int32).reshape(-1)))
            except (OverflowError, ValueError) as error:
                raise RequestError(400, f"{place}[{number}]: {error}; token ids are integers below 2**31") from error
        elif chunk.type == "image":
            found.append(ImageChunk(chunk.data, chunk.format, chunk.expected_tokens))
        elif chunk.type == "image_asset_pointer":
            found.append(ImagePointerChunk(chunk.location, chunk.format, chunk.expected_tokens))
        else:
            raise RequestError(400, f"{place}[{number}] is {chunk.type}; this server takes text and images")
    return found


def _chunk(place: str, chunk: Any) -> Chunk:
    kind = chunk.WhichOneof("chunk")
    if kind == "encoded_text":
        return TextChunk(_from_bytes(place, chunk.encoded_text.tokens, "<i4"))
    if kind == "image":
        image = chunk.image
        if image.HasField("override_dimensions"):
            raise RequestError(400, f"{place}: override_dimensions is not supported; send the image in that size")
        return ImageChunk(
            image.data, image.format, image.expected_tokens if image.HasField("expected_tokens") else None
        )
    raise RequestError(400, f"{place} is {kind or 'empty'}; this server takes text and images")


def _array(place: str, tensor: Any) -> np.ndarray:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise RequestError(400, f"{place} has dtype {tensor.dtype}; send float32, int64 or int32")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        raise RequestError(400, f"{place} is sparse; this server takes one dense number for each token")
    array = _from_bytes(place, tensor.dense, dtype)
    shape = list(tensor.shape) or [len(array)]
    if shape != [len(array)]:
        raise RequestError(400, f"{place} has shape {shape} and {len(array)} values; send one value for each token")
    return array


def _from_bytes(place: str, data: bytes, dtype: str) -> np.ndarray:
    try:
        return np.frombuffer(data, dtype)
    except ValueError as error:
        raise RequestError(400, f"{place} has {len(data)} bytes, which are no whole numbers of {dtype}") from error


def train_result(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """A `ForwardBackwardOutput`: the log-probabilities of each row, and the metrics."""
    offsets = np.concatenate([[0], np.cumsum([4 * len(row) for row in logprobs])]).astype("<i8")
    data = np.concatenate([np.empty(0, np.float32), *logprobs]).astype("<f4")
    tensor = messages.BatchedTensor(data=data.tobytes(), offsets=offsets.tobytes(), dtype=messages.DTYPE_FLOAT32)
    record = messages.ArrayRecord(type_tag="ArrayRecord", fields={"logprobs": tensor}, num_datums=len(logprobs))
    output = messages.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics
    )
    return bytes(output.SerializeToString())


def sample_result(result: SampleResult) -> bytes:
    """A `SampleResponse`."""
    response = messages.SampleResponse()
    for sequence in result.sequences:
        response.sequences.append(
            messages.SampledSequence(
                stop_reason=_STOP[sequence.stopped],
                tokens=sequence.token_ids.astype("<i4").tobytes(),
                logprobs=sequence.logprobs.astype("<f4").tobytes(),
                topk_sampled_logprobs=_topk(sequence.topk),
            )
        )
    if result.prompt_logprobs is not None:
        response.prompt_logprobs = result.prompt_logprobs.astype("<f4").tobytes()
    if result.topk_prompt is not None:
        response.topk_prompt_logprobs.CopyFrom(_topk(result.topk_prompt))
    return bytes(response.SerializeToString())


def _topk(topk: TopLogprobs | None) -> Any:
    if topk is None:
        return None
    length, k = topk.token_ids.shape
    ids, logprobs = topk.token_ids.astype("<i4").tobytes(), topk.logprobs.astype("<f4").tobytes()
    return messages.TopkLogprobs(token_ids=ids, logprobs=logprobs, k=k, length=length)
