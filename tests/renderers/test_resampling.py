"""Resized pixels equal those of torch, bit for bit."""

import multiprocessing
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from renderers.vision import resampling

MODES = {2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}
SIDES = st.one_of(st.integers(1, 12), st.integers(1, 300), st.integers(1, 1500))


def pixels(height: int, width: int, seed: int = 0, *, extreme: bool = False) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 2 if extreme else 256, (3, height, width), dtype=np.uint8)
    return values * 255 if extreme else values


def torchs(planes: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    resized = tv.resize(torch.from_numpy(planes), [height, width], interpolation=MODES[resample], antialias=True)
    return np.asarray(resized.numpy())


def check_equal(planes: np.ndarray, height: int, width: int, resample: int) -> None:
    is_changed = planes.shape[1:] != (height, width)
    for resize in (resampling.resize, *[resampling._resize_in_blas] * is_changed):
        ours = resize(planes, height, width, resample)
        assert ours.dtype == np.uint8
        assert ours.shape == (3, height, width)
        np.testing.assert_array_equal(ours, torchs(planes, height, width, resample))


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(
    before=st.tuples(SIDES, SIDES),
    after=st.tuples(SIDES, SIDES).filter(lambda size: size != (1, 1)),  # torch fails there
    resample=st.sampled_from(list(MODES)),
    seed=st.integers(0, 9),
    extreme=st.booleans(),
)
@example(before=(1, 1), after=(256, 256), resample=3, seed=0, extreme=False)
@example(before=(1, 1500), after=(16, 1504), resample=3, seed=0, extreme=True)
@example(before=(1500, 1), after=(1500, 64), resample=2, seed=0, extreme=True)
@example(before=(300, 300), after=(300, 28), resample=3, seed=0, extreme=False)
@example(before=(300, 300), after=(28, 300), resample=3, seed=0, extreme=False)
def test_every_size_gives_the_pixels_of_torch(
    before: tuple[int, int], after: tuple[int, int], resample: int, seed: int, extreme: bool
) -> None:
    check_equal(pixels(*before, seed, extreme=extreme), *after, resample)


@pytest.mark.slow
@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize(
    ("before", "after"),
    [((3000, 4000), (768, 1024)), ((4096, 4096), (32, 32)), ((64, 4096), (4096, 64)), ((40, 4000), (32, 96))],
)
def test_large_images_give_the_pixels_of_torch(before: tuple[int, int], after: tuple[int, int], extreme: bool) -> None:
    check_equal(pixels(*before, extreme=extreme), *after, 3)


def test_a_process_resizes_with_the_torch_that_it_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("_resize_in_blas", "_resize_in_torch"):
        monkeypatch.setattr(resampling, name, lambda *_, name=name: calls.append(name))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    resampling.resize(pixels(20, 30), 28, 28, 3)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    resampling.resize(pixels(20, 30), 28, 28, 3)
    monkeypatch.delitem(sys.modules, "torch")
    resampling.resize(pixels(20, 30), 28, 28, 3)
    assert calls == ["_resize_in_torch", "_resize_in_blas", "_resize_in_blas"]


@pytest.mark.slow
def test_a_forked_process_resizes_after_its_parent_has_used_the_threads_of_torch() -> None:
    planes = pixels(750, 1000)
    expected = torchs(planes, 736, 992, 3)
    torch.ones(1 << 20).exp().sum()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        found = pool.apply_async(resampling.resize, (planes, 736, 992, 3)).get(timeout=60)
    np.testing.assert_array_equal(found, expected)
