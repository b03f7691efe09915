"""Arguments of a wrong type or range are errors of `renderers` that name the argument, its value and the cure."""

import math

import pytest

from renderers import MediaPolicy
from renderers.errors import ConfigError, RendererError


@pytest.mark.parametrize("option", ["max_bytes", "max_pixels", "max_frames", "max_video_pixels", "timeout"])
@pytest.mark.parametrize("value", [-1, math.nan, "5", None, True])
def test_limits_of_a_media_policy(option, value):
    with pytest.raises(ConfigError, match=f"MediaPolicy.{option} is .*; it can be a number of at least 0"):
        MediaPolicy(**{option: value})


def test_a_negative_sampled_id_is_named(renderer):
    with pytest.raises(RendererError, match="token 1 has id -1; pass the sampled ids"):
        renderer.parse_response([65, -1, 5])
    assert renderer.parse_response([65, renderer.tokenizer.vocab_size + 9]).content == "b\ufffd"
