"""Torch tensors survive the wire unchanged, also where torch is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from transport import EncodeError, RawTensor, decode, encode, encode_frames
from transport.wire import wire_format
from transport.wire.arrays import TENSOR_ITEM_BYTES

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int64", "bool", "uint8", "complex64", "float8_e4m3fn", "uint16"]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_every_dtype_and_shape_comes_back_as_an_equal_tensor(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(getattr(torch, dtype))
    back = decode(encode({"t": tensor}))["t"]
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    back.zero_()  # owns its memory: what was received cannot be changed through it


def test_a_view_sends_its_own_bytes_and_not_its_storage() -> None:
    big = torch.zeros(1000, 1000, dtype=torch.bfloat16)
    assert memoryview(encode_frames(big[3])[1]).nbytes == 2000
    assert memoryview(encode_frames(big[:, 3])[1]).nbytes == 2000
    assert torch.equal(decode(encode(big.T[:2])), big.T[:2])


def test_a_contiguous_tensor_is_not_copied_into_its_frame() -> None:
    tensor = torch.arange(1000)
    assert np.shares_memory(np.frombuffer(encode_frames(tensor)[1], np.uint8), tensor.numpy())


def test_parameters_travel_as_tensors_and_conjugates_as_their_values() -> None:
    assert torch.equal(decode(encode(torch.nn.Parameter(torch.ones(2)))), torch.ones(2))
    assert decode(encode(torch.tensor([1 + 2j]).conj())).tolist() == [1 - 2j]


def test_a_tensor_as_a_dict_key_is_refused() -> None:
    with pytest.raises(EncodeError, match="key"):
        encode({torch.ones(2): 1})


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


@pytest.mark.parametrize("dtype", TENSOR_ITEM_BYTES)
@pytest.mark.parametrize("beyond", [0, 1])
def test_tensors_of_every_dtype_are_exact_on_both_sides_of_the_boundary(dtype: str, beyond: int) -> None:
    count = wire_format.MAX_INLINE_BYTES // TENSOR_ITEM_BYTES[dtype] + beyond
    raw = torch.arange(count * TENSOR_ITEM_BYTES[dtype], dtype=torch.uint8) % 2
    tensor = raw.view(getattr(torch, dtype))
    assert len(encode_frames(tensor)) == 1 + beyond
    back = decode(encode(tensor))
    assert back.dtype == tensor.dtype
    assert torch.equal(back.view(torch.uint8), raw)
    back.zero_()


def test_one_small_tensor_referred_to_twice_is_one_tensor_after_decoding() -> None:
    tensor = torch.ones(3)
    first, second = decode(encode([tensor, tensor]))
    assert first is second


@pytest.mark.slow
def test_a_process_that_cannot_import_torch_sends_every_dtype_on_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, size in TENSOR_ITEM_BYTES.items():
        raw = torch.randint(0, 2 if name == "bool" else 256, (3, 2, size), dtype=torch.uint8, generator=generator)
        tensors[name] = raw.view(getattr(torch, name)).reshape(3, 2)
    sent, relayed = tmp_path / "sent", tmp_path / "relayed"
    sent.write_bytes(encode(tensors))
    code = """
import importlib.abc, sys
class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoTorch())
from pathlib import Path
from transport import RawTensor, decode, encode
tensors = decode(Path(sys.argv[1]).read_bytes())
assert all(type(t) is RawTensor and (t.dtype, t.shape) == (name, (3, 2)) for name, t in tensors.items())
Path(sys.argv[2]).write_bytes(encode(tensors))
assert "torch" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code, str(sent), str(relayed)], check=False).returncode == 0
    back = decode(relayed.read_bytes())
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8))


def test_a_dtype_younger_than_the_torch_that_is_here_rests_as_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = encode(torch.zeros(4, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    assert type(decode(buffer)) is RawTensor
