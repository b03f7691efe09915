"""What is kept now and encoded later is refused now, and the place of what is wrong is named."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engines.protocol import WeightSpan
from transport import EncodeError, encode
from transport.wire.codec import check_encodable, is_plain


@pytest.mark.parametrize("code", [1, 2, 3, 77])
@pytest.mark.parametrize(
    "shell",
    [
        lambda ext: ext,
        lambda ext: [[1], ext],
        lambda ext: {"a": {"b": ext}},
        lambda ext: (ext,),
        lambda ext: [(1,), np.zeros(3), [ext]],
        lambda ext: WeightSpan("v", 1, [ext]),
    ],
)
def test_an_extension_value_of_msgpack_is_refused_because_it_would_be_decoded_as_a_reference(code, shell):
    value = shell(msgpack.ExtType(code, b"\0"))
    assert not is_plain(value)
    with pytest.raises(EncodeError, match="ExtType"):
        encode(value)
    with pytest.raises(EncodeError, match=r"info.*ExtType"):
        check_encodable(value, "info")


def nested(depth, shell):
    value = 0
    for _ in range(depth):
        value = shell(value)
    return value


@pytest.mark.parametrize("shell", [lambda v: [v], lambda v: {"a": v}, lambda v: (v,)], ids=["list", "dict", "tuple"])
def test_what_only_just_fits_by_itself_is_refused_for_it_will_be_inside_of_something(shell):
    most = next(depth for depth in range(900, 1100) if not fits(nested(depth + 1, shell)))
    check_encodable(nested(most - 40, shell))
    with pytest.raises(EncodeError):
        check_encodable(nested(most, shell))


def fits(value):
    try:
        encode(value)
    except EncodeError:
        return False
    return True


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.integers(),
        st.floats(),
        st.text(st.characters(codec=None)),
        st.complex_numbers(),
        st.just(object()),
    ),
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.tuples(parts, parts),
        st.dictionaries(st.one_of(st.text(max_size=2), st.tuples(), st.integers()), parts, max_size=3),
    ),
    max_leaves=8,
)


@given(VALUES)
def test_it_accepts_what_encode_accepts(value):
    if fits(value):
        check_encodable(value)
    else:
        with pytest.raises(EncodeError, match=r"^here"):
            check_encodable(value, "here")


@given(VALUES)
def test_plain_values_can_be_encoded(value):
    if is_plain(value):
        check_encodable(value)
        assert fits(value)
