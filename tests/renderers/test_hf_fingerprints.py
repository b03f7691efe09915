"""Fingerprints of HFProcessor: they change with every setting that changes pixels, and not between processes."""

from pathlib import Path
from typing import Any

import pytest
from processor_outputs import copy_with_config, load_processors

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.slow
def test_the_fingerprint_changes_with_every_setting_that_changes_pixels(
    processor_directory: Any, hf_processors: Any, tmp_path: Path
) -> None:
    def other_mean(config: dict[str, Any]) -> None:
        config["image_processor"]["image_mean"][1] += 0.25

    def other_size(config: dict[str, Any]) -> None:
        config["image_processor"]["size"]["longest_edge"] = 512

    def other_tokens(config: dict[str, Any]) -> None:
        config["spatial_merge_size"] = 2

    def other_separator(config: dict[str, Any]) -> None:
        config["image_break_token"] = "[INST]"

    known = hf_processors("pixtral")["image"].fingerprint
    found = {known}
    for index, change in enumerate((other_mean, other_size, other_tokens, other_separator)):
        found.add(
            load_processors(copy_with_config(processor_directory("pixtral"), tmp_path / str(index), change))[
                "image"
            ].fingerprint
        )
    assert len(found) == 5
    assert len(known) == 16
    assert set(known) <= set("0123456789abcdef")
    assert (
        load_processors(copy_with_config(processor_directory("pixtral"), tmp_path / "same", lambda _: None))[
            "image"
        ].fingerprint
        == known
    )


@pytest.mark.slow
def test_the_fingerprints_of_images_and_videos_depend_on_their_own_settings_only(
    processor_directory: Any, hf_processors: Any, tmp_path: Path
) -> None:
    def other_frames(config: dict[str, Any]) -> None:
        config["video_processor"]["patch_size"] = 16

    other = load_processors(copy_with_config(processor_directory("kimi-k2.5"), tmp_path / "other", other_frames))
    known = hf_processors("kimi-k2.5")
    assert other["image"].fingerprint == known["image"].fingerprint != known["video"].fingerprint
    assert other["video"].fingerprint != known["video"].fingerprint
