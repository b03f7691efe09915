"""Messages of the Tinker API as arrays, and results as messages. Their types are those of the package `tinker`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as messages

from rollouts.engines.protocol import TopLogprobs
from rollouts.serve.errors import RequestError
from rollouts.tinker.requests import Chunk, ImageChunk, ImagePointerChunk, PromptTargets, SampleResult, TextChunk

#: The content type of the messages, in both directions.
PROTOBUF: Final = "application/x-protobuf"

_DTYPES: Final[Mapping[int, str]] = {
    messages.DTYPE_FLOAT32: "<f4",
    messages.DTYPE_INT64: "<i8",
    messages.DTYPE_INT32: "<i4",
}
#: What the sparse tensors of a request may stand for, all together: a few bytes of one can stand for any
#: number.
_MOST_VALUES: Final = 2**26
_STOP: Final = {True: messages.STOP_REASON_STOP, False: messages.STOP_REASON_LENGTH}


class Row(NamedTuple):
    """A datum: the chunks of its input, and the inputs of the loss by name, `target_tokens` among them."""

    chunks: Sequence[Chunk]
    inputs: Mapping[str, np.ndarray]


class TrainRequest(NamedTuple):
    """Rows for a loss of a model. `options` are the numbers of the loss, as sent.

    Those whose names begin with `correction.` are the `correction` of `Trainer.forward_backward`; None: there
    are none of these.

    `seq_id` counts the requests of the model. `problem`: why the rows cannot be read; then there are none.
    """

    model_id: str
    seq_id: int
    loss: str
    options: Mapping[str, Any]
    correction: Mapping[str, Any] | None
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
    options: dict[str, Any] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        options[name] = value.text if value.WhichOneof("value") == "text" else value.number
    correction = {
        name.removeprefix("correction."): options.pop(name) for name in list(options) if name.startswith("correction.")
    }
    fields = (message.model_id, message.seq_id, message.loss_fn, options, correction or None, message.forward_only)
    try:
        _check_sparse(message)
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


def prompt_targets(place: str, tensor: Any) -> PromptTargets:
    """The token ids of a `TensorData` in JSON, dense or sparse. Raises `RequestError` (400)."""
    shape = tensor.shape or []
    if tensor.dtype != "int64" or len(shape) != 2:
        rule = "send int64 token ids, k for each token of the prompt but the first"
        raise RequestError(400, f"{place} is {tensor.dtype} of shape {shape}; {rule}")
    ids = _integers(place, tensor.data)
    if tensor.sparse_crow_indices is not None:
        columns = _integers(place, tensor.sparse_col_indices or [])
        rows = rows_of_csr(place, shape, _integers(place, tensor.sparse_crow_indices), columns, len(ids))
    elif min(shape) < 1 or math.prod(shape) != len(ids):
        raise RequestError(400, f"{place} has shape {shape} and {len(ids)} values; send one token id for each")
    else:
        rows = np.repeat(np.arange(shape[0]), shape[1])
    return PromptTargets(shape[0], rows, ids)


def _integers(place: str, values: Sequence[int] | Sequence[float]) -> np.ndarray:
    array = np.asarray(values)
    if len(array) and array.dtype.kind != "i":
        raise RequestError(400, f"{place} has values that are no integers below 2**63; send token ids")
    return array.astype(np.int64)


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
    shape = list(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        sparse = tensor.sparse_csr
        values = _from_bytes(place, sparse.values, dtype)
        crow, columns = (_from_bytes(place, data, "<i8") for data in (sparse.crow_indices, sparse.col_indices))
        rows = rows_of_csr(place, shape, crow, columns, len(values))
        array = np.zeros(shape, dtype)
        array[rows, columns] = values
        return array
    array = _from_bytes(place, tensor.dense, dtype)
    shape = shape or [len(array)]
    if len(shape) > 2 or min(shape) < 1 or math.prod(shape) != len(array):
        rule = "send one value for each token, or (tokens, k)"
        raise RequestError(400, f"{place} has shape {shape} and {len(array)} values; {rule}")
    return array.reshape(shape)


def _check_sparse(message: Any) -> None:
    tensors = [tensor for datum in message.data for tensor in datum.loss_fn_inputs.values()]
    count = sum(abs(math.prod(each.shape)) for each in tensors if each.WhichOneof("encoding") == "sparse_csr")
    if count > _MOST_VALUES:
        rule = f"this server takes up to {_MOST_VALUES}; send fewer rows a request"
        raise RequestError(400, f"data: its sparse tensors stand for {count} values, and {rule}")


def rows_of_csr(place: str, shape: Sequence[int], crow: np.ndarray, columns: np.ndarray, count: int) -> np.ndarray:
    """The row of each of `count` values of a sparse tensor: `crow` is where rows end, `columns` where values are.

    Raises `RequestError` (400) where these do not fit to each other and to `shape`.
    """
    if (
        (len(shape), len(columns)) != (2, count)
        or not 0 < min(shape) <= max(shape) < 2**63
        or len(crow) != shape[0] + 1
        or (crow[0], crow[-1]) != (0, count)
        or (np.diff(crow) < 0).any()
    ):
        found = f"sparse, {list(shape)}, with {count} values, {len(columns)} columns and {len(crow)} ends of rows"
        raise RequestError(400, f"{place} is {found}; send a matrix, with ends of rows from 0 to the number of values")
    if count and not 0 <= columns.min() <= columns.max() < shape[1]:
        wrong = columns.max() if columns.max() >= shape[1] else columns.min()
        raise RequestError(400, f"{place} has a value in column {wrong} of shape {list(shape)}")
    return np.repeat(np.arange(shape[0]), np.diff(crow))


def _from_bytes(place: str, data: bytes, dtype: str) -> np.ndarray:
    try:
        return np.frombuffer(data, dtype)
    except ValueError as error:
        raise RequestError(400, f"{place} has {len(data)} bytes, which are no whole numbers of {dtype}") from error


def train_result(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """A `ForwardBackwardOutput`: the log-probabilities of each row, and the metrics."""
    records = [_record(list(rows), width) for width, rows in groupby(logprobs, key=lambda row: row.shape[1:])]
    output = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=records, metrics=metrics)
    return bytes(output.SerializeToString())


def _record(logprobs: Sequence[np.ndarray], width: tuple[int, ...]) -> Any:
    offsets = np.concatenate([[0], np.cumsum([4 * row.size for row in logprobs])]).astype("<i8").tobytes()
    data = np.concatenate(logprobs).astype("<f4").tobytes()
    tensor = messages.BatchedTensor(data=data, offsets=offsets, dtype=messages.DTYPE_FLOAT32, trailing_shape=width)
    return messages.ArrayRecord(type_tag="ArrayRecord", fields={"logprobs": tensor}, num_datums=len(logprobs))


def sample_result(result: SampleResult, layout: Any = None) -> bytes:
    """A `SampleResponse`. `layout`: the `TensorData` that `target_logprobs` have the shape of, dense or sparse."""
    response = messages.SampleResponse(
        sequences=[
            messages.SampledSequence(
                stop_reason=_STOP[sequence.stopped],
                tokens=sequence.token_ids.astype("<i4").tobytes(),
                logprobs=sequence.logprobs.astype("<f4").tobytes(),
                topk_sampled_logprobs=_topk(sequence.topk),
            )
            for sequence in result.sequences
        ],
        prompt_logprobs=None if result.prompt_logprobs is None else result.prompt_logprobs.astype("<f4").tobytes(),
        topk_prompt_logprobs=_topk(result.topk_prompt),
    )
    if result.target_logprobs is not None:
        data = result.target_logprobs.astype("<f4").tobytes()
        places: dict[str, Any] = {"dense": data}
        if layout.sparse_crow_indices is not None:
            ends = np.asarray(layout.sparse_crow_indices, "<i8").tobytes()
            columns = np.asarray(layout.sparse_col_indices, "<i8").tobytes()
            places = {"sparse_csr": {"values": data, "crow_indices": ends, "col_indices": columns}}
        scored = messages.Tensor(dtype=messages.DTYPE_FLOAT32, shape=layout.shape, **places)
        response.target_prompt_logprobs.CopyFrom(scored)
    if result.alternatives is not None:
        ids, logprobs = result.alternatives
        tokens = messages.Tensor(dense=ids.astype("<i8").tobytes(), dtype=messages.DTYPE_INT64, shape=ids.shape)
        data = logprobs.astype("<f4").tobytes()
        scores = messages.Tensor(dense=data, dtype=messages.DTYPE_FLOAT32, shape=ids.shape)
        response.prompt_alt_tokens.CopyFrom(messages.PromptAltTokens(tokens=tokens, logprobs=scores))
    return bytes(response.SerializeToString())


def _topk(topk: TopLogprobs | None) -> Any:
    if topk is None:
        return None
    length, k = topk.token_ids.shape
    ids, logprobs = topk.token_ids.astype("<i4").tobytes(), topk.logprobs.astype("<f4").tobytes()
    return messages.TopkLogprobs(token_ids=ids, logprobs=logprobs, k=k, length=length)
