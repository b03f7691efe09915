"""Torch tensors survive the wire unchanged, also where torch is not installed."""

import sys

import pytest

from transport import EncodeError, RawTensor, decode, encode, encode_frames

torch = pytest.importorskip("torch")


def test_a_view_sends_its_own_bytes_and_not_its_storage() -> None:
    big = torch.zeros(1000, 1000, dtype=torch.bfloat16)
    assert memoryview(encode_frames(big[3])[1]).nbytes == 2000
    assert memoryview(encode_frames(big[:, 3])[1]).nbytes == 2000
    assert torch.equal(decode(encode(big.T[:2])), big.T[:2])


def test_sparse_and_meta_tensors_are_refused() -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(EncodeError, match=r"value\[0\]: torch tensor with layout"):
            encode([tensor])


def test_without_torch_a_tensor_rests_as_its_bytes_and_is_sent_on_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.ones(2, 2, dtype=torch.bfloat16), torch.arange(3), torch.empty(0, 2)]
    buffer = encode(tensors)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch", None)
        raw = decode(buffer)
        relayed = encode(raw)
    assert all(type(r) is RawTensor and not r.data.flags.writeable for r in raw)
    assert (raw[0].dtype, raw[0].shape, raw[0].data.nbytes) == ("bfloat16", (2, 2), 8)
    assert raw[1].numpy().tolist() == [0, 1, 2]
    with pytest.raises(TypeError):
        raw[0].numpy()
    assert all(torch.equal(a, b) for a, b in zip(decode(relayed), tensors, strict=True))
    with pytest.raises(EncodeError, match="bytes are not a RawTensor"):
        encode(RawTensor("bfloat16", (3,), raw[0].data))


def test_a_dtype_younger_than_the_torch_that_is_here_rests_as_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = encode(torch.zeros(4, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    assert type(decode(buffer)) is RawTensor
