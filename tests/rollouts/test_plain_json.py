"""Arrays, tensors and everything else that an episode may hold come out of JSON as what went in."""

import base64
import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_files import file_of, short
from typer.testing import CliRunner

from renderers import MediaSource
from rollouts.cli.main import app
from rollouts.engines.protocol import FinishReason, WeightSpan
from rollouts.errors import RolloutsError
from rollouts.trajectory.plain_json import plain, trajectory_json
from transport import RawTensor


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(plain(value), allow_nan=False))


def read_array(entry: dict[str, Any]) -> np.ndarray:
    assert sorted(entry) == ["data", "dtype", "shape"]
    data = [np.nan if one is None else one for one in entry["data"]]
    if entry["dtype"].startswith(("c", ">c")):
        data = [complex(one["real"], one["imag"]) for one in data]
    if "S" in entry["dtype"]:
        data = [base64.b64decode(one["base64"]) for one in data]
    return np.array(data, entry["dtype"]).reshape(entry["shape"])


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    hnp.arrays(
        st.one_of(
            hnp.boolean_dtypes(),
            hnp.integer_dtypes(),
            hnp.unsigned_integer_dtypes(),
            hnp.floating_dtypes(sizes=(16, 32, 64)),
            hnp.complex_number_dtypes(sizes=(64, 128)),
            hnp.unicode_string_dtypes(max_len=3),
            hnp.byte_string_dtypes(max_len=3),
        ),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
        elements={"allow_nan": False, "allow_infinity": False},
    )
)
def test_an_array_of_any_plain_dtype_comes_back_from_json_element_by_element(array: np.ndarray) -> None:
    read = read_array(through_json(array))
    assert (read.shape, read.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(read, array)


def test_a_tensor_at_rest_is_written_as_the_tensor_that_it_stands_for() -> None:
    bits = np.array([0x3F80, 0xC020], np.uint16)
    assert plain(RawTensor("bfloat16", (1, 2), bits.view(np.uint8))) == {
        "dtype": "bfloat16",
        "shape": [1, 2],
        "data": [1.0, -2.5],
    }
    assert plain(RawTensor("float8_e5m2", (2,), np.array([1, 2], np.uint8))) == {
        "dtype": "float8_e5m2",
        "shape": [2],
        "data": {"base64": "AQI="},
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(-0.1), -0.1),
        (float("nan"), None),
        ({1: (b"ab", FinishReason.STOP)}, {"1": [{"base64": "YWI="}, "stop"]}),
        (WeightSpan("v", 0, 1), {"version": "v", "start": 0, "end": 1}),
        (MediaSource.of(b"x"), {"digest": MediaSource.of(b"x").digest}),
        (np.datetime64("2024-01-01"), "2024-01-01"),
        ({1: "a", "1": "b"}, [[1, "a"], ["1", "b"]]),
        (1 + 2j, {"real": 1.0, "imag": 2.0}),
        (np.void(b"ab"), {"base64": "YWI="}),
        (np.array(["2024-01-02"], "M8[D]"), {"dtype": "datetime64[D]", "shape": [1], "data": ["2024-01-02"]}),
        (np.array([np.nan, 1], np.float32), {"dtype": "float32", "shape": [2], "data": [None, 1.0]}),
        (datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC), "2024-01-02 00:00:00+00:00"),
        ({(1, 2): np.zeros(1, np.uint8)}, {"[1, 2]": {"dtype": "uint8", "shape": [1], "data": [0]}}),
    ],
)
def test_values_that_json_lacks_are_written_in_full(value: Any, expected: Any) -> None:
    assert through_json(value) == expected


@dataclasses.dataclass
class Holder:
    value: Any


@pytest.mark.parametrize(
    "value", [object(), np.array([object()]), object, range(3), Holder(object()), [{"a": {1j: len}}]]
)
def test_a_value_without_a_form_in_json_is_an_error_and_never_its_repr(value: Any) -> None:
    with pytest.raises(RolloutsError, match="cannot be written as JSON"):
        plain(value)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["traj", *map(str, arguments)])


def test_no_episode_as_json_holds_the_repr_of_a_tensor_or_array() -> None:
    torch = pytest.importorskip("torch")
    episode = short("a")
    image = np.arange(40_000, dtype=np.float32).reshape(200, 200)  # its repr leaves most of it out
    episode.turns = [
        dataclasses.replace(
            episode.turns[0],
            info={"mask": torch.from_numpy(image), "array": image, "deep": [({"x": torch.zeros(2000)},)]},
            message={"role": "assistant", "content": [{"type": "image", "image": image}]},
        )
    ]
    text = json.dumps(trajectory_json(episode))
    (turn,) = json.loads(text)["turns"]
    info, message = turn["info"], turn["message"]
    assert "tensor(" not in text
    for entry in (info["mask"], info["array"], message["content"][0]["image"]):
        np.testing.assert_array_equal(read_array(entry), image)
    assert info["deep"][0][0]["x"] == {"dtype": "float32", "shape": [2000], "data": [0.0] * 2000}


def test_an_episode_with_a_value_that_has_no_form_is_named_and_the_others_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollouts.trajectory import plain_json as module

    bad = short("bad")
    bad.turns = [dataclasses.replace(bad.turns[0], info={"when": datetime.date(2024, 1, 2)})]
    path = file_of(tmp_path / "t.mmr", short("a"), bad, short("b"))
    monkeypatch.setattr(module, "_TEXT", ())  # a class that this table forgot
    result = run("export", path, "--level", "turn", "--jsonl", tmp_path / "out")
    assert result.exit_code == 1
    assert (
        "not exported: record 1, episode 'bad': a value of type datetime.date cannot be written as JSON"
        in result.stderr
    )
    assert result.stdout.startswith("2 turns")
