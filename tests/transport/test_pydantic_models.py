"""pydantic models travel by field name and are what their configuration says when they arrive."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pydantic
import pytest
from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field

from transport import EncodeError, MalformedError, decode, encode, wire_type
from transport.errors import DecodeError, TransportError
from transport.wire import registry


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_by_name", {})
    monkeypatch.setattr(registry, "_by_class", {})


def model(version: int = 1, config: ConfigDict | None = None, /, **fields: Any) -> Any:
    made = pydantic.create_model("Step", __config__=config, **fields)
    registry._by_name.clear()
    registry._by_class.clear()
    return wire_type("tests.Step", version)(made)


def test_a_model_comes_back_equal_with_its_nested_models_arrays_and_tuples() -> None:
    @wire_type("tests.Inner")
    class Inner(BaseModel):
        model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)
        pixels: np.ndarray

    @wire_type("tests.Outer")
    class Outer(BaseModel):
        inner: tuple[Inner, ...]
        scores: dict[str, float] = Field(default_factory=dict)

    sent = Outer(inner=(Inner(pixels=np.arange(3)), Inner(pixels=np.zeros((2, 2)))), scores={"a": 0.5})
    back = decode(encode({"steps": [sent, sent]}))["steps"]
    assert back[0] is back[1]
    assert type(back[0].inner) is tuple
    assert [inner.pixels.tolist() for inner in back[0].inner] == [[0, 1, 2], [[0, 0], [0, 0]]]
    assert back[0].scores == {"a": 0.5}


def test_which_fields_were_set_comes_back_so_that_exclude_unset_means_the_same() -> None:
    cls = model(role=(str, ...), content=(str, ""), name=(str | None, None))
    sent = cls(role="user", name=None)
    back = decode(encode(sent))
    assert back == sent
    assert back.model_dump(exclude_unset=True) == {"role": "user", "name": None}
    assert decode(encode(cls(role="r", content="c", name="n"))).model_fields_set == {"role", "content", "name"}


def test_unknown_fields_are_dropped_kept_or_refused_as_the_model_says() -> None:
    buffer = encode(model(x=(int, ...), y=(int, ...))(x=1, y=2))
    ignoring = model(x=(int, ...))
    assert decode(buffer) == ignoring(x=1)
    allowing = model(1, ConfigDict(extra="allow"), x=(int, ...))
    assert decode(buffer) == allowing(x=1, y=2)
    assert decode(buffer).model_extra == {"y": 2}
    model(1, ConfigDict(extra="forbid"), x=(int, ...))
    with pytest.raises(MalformedError, match=r"(?s)tests\.Step: its constructor raised .*y"):
        decode(buffer)


def test_what_a_model_has_beyond_its_fields_comes_back_through_a_relay_that_keeps_it() -> None:
    cls = model(1, ConfigDict(extra="allow"), x=(int, ...))
    sent = cls(x=1, more={"deep": (1, 2)}, array=b"1")
    back = decode(encode(decode(encode(sent))))
    assert back == sent
    assert back.model_extra == {"more": {"deep": (1, 2)}, "array": b"1"}
    newer = model(x=(int, ...), array=(bytes, b""))
    assert decode(relayed(sent, cls)) == newer(x=1, array=b"1")


def relayed(sent: BaseModel, cls: type) -> bytes:
    """`sent` by a peer that has `cls`, whatever is registered here."""
    here = dict(registry._by_name), dict(registry._by_class)
    registry._by_name.clear()
    registry._by_class.clear()
    wire_type("tests.Step")(cls)
    buffer = encode(sent)
    registry._by_name.clear()
    registry._by_class.clear()
    registry._by_name.update(here[0])
    registry._by_class.update(here[1])
    return buffer


def test_missing_fields_take_their_default_and_required_ones_are_named() -> None:
    buffer = encode(model(x=(int, ...))(x=1))
    newer = model(x=(int, ...), y=(list[int], Field(default_factory=lambda: [7])))
    assert decode(buffer) == newer(x=1, y=[7])
    model(x=(int, ...), y=(int, ...))
    with pytest.raises(DecodeError) as caught:
        decode(buffer)
    assert "tests.Step was sent without its field 'y'" in str(caught.value)


def test_values_are_validated_on_arrival() -> None:
    buffer = encode(model(x=(int, ...))(x=-1))
    model(x=(int, Field(gt=0)))
    with pytest.raises(MalformedError, match=r"tests\.Step: its constructor raised"):
        decode(buffer)
    converting = model(x=(str, ...))
    with pytest.raises(MalformedError):
        decode(buffer)
    assert converting(x="a").x == "a"


def test_a_newer_version_is_refused() -> None:
    buffer = encode(model(2, x=(int, ...))(x=1))
    model(1, x=(int, ...))
    with pytest.raises(DecodeError, match="has version 2 and this installation reads up to 1"):
        decode(buffer)


def test_a_model_and_a_dataclass_of_one_name_understand_each_other() -> None:
    buffer = encode(model(x=(int, ...), y=(int, 5))(x=1))
    registry._by_name.clear()
    registry._by_class.clear()

    @wire_type("tests.Step")
    @dataclasses.dataclass
    class Step:
        x: int
        y: int = 0

    assert decode(buffer) == Step(1, 5)
    buffer = encode(Step(3, 4))
    assert decode(buffer) == Step(3, 4)
    there = model(x=(int, ...), y=(int, 5))
    assert decode(buffer) == there(x=3, y=4)


@pytest.mark.parametrize("alias", ["wireName", AliasChoices(AliasPath("a", 0), "wireName")])
def test_fields_with_an_alias_still_go_by_their_name(alias: Any) -> None:
    cls = model(x=(int, Field(validation_alias=alias)), y=(int, 0))
    sent = cls(wireName=3)
    assert b"wireName" not in encode(sent)
    assert decode(encode(sent)) == sent


def test_an_unknown_field_that_is_called_like_an_alias_is_not_taken_for_it() -> None:
    buffer = encode(model(old=(int, ...))(old=9))
    cls = model(x=(int, Field(default=1, validation_alias="old")))
    assert decode(buffer) == cls()


def test_private_and_excluded_fields_stay_at_home() -> None:
    @wire_type("tests.Client")
    class Client(BaseModel):
        url: str
        key: str = Field(default="none", exclude=True)
        _socket: Any = pydantic.PrivateAttr(default=None)

    sent = Client(url="u", key="secret")
    sent._socket = object()
    assert b"secret" not in encode(sent)
    assert decode(encode(sent)).key == "none"


def test_models_that_could_not_be_made_again_do_not_register() -> None:
    class Items(pydantic.RootModel[list[int]]):
        pass

    class Hidden(BaseModel):
        key: str = Field(exclude=True)

    class ByPath(BaseModel):
        x: int = Field(validation_alias=AliasPath("a", 0))

    for cls, says in ((Items, "root"), (Hidden, "default"), (ByPath, "populate_by_name")):
        with pytest.raises(TransportError, match=says):
            wire_type("tests.No")(cls)


def test_a_model_or_dataclass_that_lacks_a_field_is_an_encode_error_that_says_where() -> None:
    cls = model(x=(int, ...), y=(int, ...))
    with pytest.raises(EncodeError, match=r"value\[0\].*without a field"):
        encode([cls.model_construct(x=1)])

    @wire_type("tests.Half")
    @dataclasses.dataclass
    class Half:
        x: int

    half = Half(1)
    del half.x
    with pytest.raises(EncodeError, match=r"value\[1\].*without a field"):
        encode([0, half])


@pytest.mark.parametrize("rest", [5, [], [[], []], [["a"]], [[1], {}], [[], {1: 2}], [[["a"]], {}]])
def test_a_rest_of_another_form_is_malformed(rest: Any) -> None:
    from handmade import message, ref, root

    from transport import decode_frames

    model(x=(int, ...))
    with pytest.raises(MalformedError):
        decode_frames(message([[1, 16, [1, rest]], root(ref(1))], types=[["tests.Step", 1, ["x", "*"]]]))


def test_registering_and_sending_dataclasses_does_not_load_pydantic() -> None:
    code = (
        "import sys, dataclasses, transport.wire.registry as r, transport.wire.codec as c\n"
        "@r.wire_type('a')\n@dataclasses.dataclass\nclass A:\n    x: int\n"
        "c.decode(c.encode(A(1)))\nsys.exit('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
