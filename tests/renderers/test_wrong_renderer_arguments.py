"""Arguments of a wrong type or range are errors of `renderers` that name the argument, its value and the cure."""

import math

import pytest

from renderers import MediaPolicy, load_renderer
from renderers.errors import ConfigError, MediaDecodeError, TokenizerError
from renderers.training_sample import build_training_sample

QUESTION = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs is 'x'; it can be a dict of variable to value"),
        ({"media_policy": {"max_bytes": 5}}, "media_policy is {'max_bytes': 5}; it can be a MediaPolicy"),
    ],
)
def test_loading(tiny_model_dir, options, error):
    with pytest.raises(ConfigError, match=error):
        load_renderer(tiny_model_dir, **options)


@pytest.mark.parametrize("option", ["max_bytes", "max_pixels", "max_frames", "max_video_pixels", "timeout"])
@pytest.mark.parametrize("value", [-1, math.nan, "5", None, True])
def test_limits_of_a_media_policy(option, value):
    with pytest.raises(ConfigError, match=f"MediaPolicy.{option} is .*; it can be a number of at least 0"):
        MediaPolicy(**{option: value})


def test_a_function_for_the_loss_mask(renderer):
    with pytest.raises(ConfigError, match="role_to_mask is 'assistant'; it can be a function"):
        build_training_sample(renderer, QUESTION, role_to_mask="assistant")


def test_a_negative_sampled_id_is_named(renderer):
    with pytest.raises(TokenizerError, match="token 1 has id -1; pass the sampled ids"):
        renderer.parse_response([65, -1, 5])
    assert renderer.parse_response([65, renderer.tokenizer.vocab_size + 9]).content == "b\ufffd"


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_part_without_a_medium(renderer, kind):
    with pytest.raises(MediaDecodeError, match=f"message 0, part 0: the part has no {kind}, url, path or base64; a"):
        renderer.render([{"role": "user", "content": [{"type": kind}]}])


def test_the_repr_of_a_renderer_names_model_and_format(renderer, tiny_model_dir):
    assert repr(renderer) == f"<TemplateRenderer of {tiny_model_dir}, format {renderer.format.name}>"
