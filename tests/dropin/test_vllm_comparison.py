"""The comparison on a real vLLM finds what it must find."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
from counting_proxy import Sent
from vllm_comparison import Side, table, violations

IMAGE = "data:image/png;base64," + "A" * 1000


def rollout(*nodes):
    return {"ok": True, "errors": [], "nodes": [{"token_ids": token_ids, "mask": mask} for token_ids, mask in nodes]}


def side(*records, times_sent=1, mismatch=1e-6):
    sent = Sent()
    for _ in range(times_sent):
        sent.add(json.dumps({"content_parts": [{"type": "image_url", "url": IMAGE}]}).encode())
    return Side(records, sent, np.array([0.0, mismatch], np.float32))


RECORD = rollout(([1, 2], [False, False]), ([3, 4, 5], [False, True, True]), ([6], [False]))


def test_equal_tokens_with_other_boundaries_of_messages_are_no_violation():
    stock = side(rollout(([1, 2, 3], [False] * 3), ([4, 5, 6], [True, True, False])), times_sent=4)
    assert list(violations(stock, side(RECORD))) == []
    assert "2 of 2" in table(stock, side(RECORD))


@pytest.mark.parametrize(
    ("ours", "found"),
    [
        (side(RECORD, mismatch=2e-4), "the largest mismatch is 2.0e-04 nats"),
        (side(RECORD, mismatch=float("nan")), "the largest mismatch is nan nats"),
        (dataclasses.replace(side(RECORD), mismatches=np.zeros(0, np.float32)), "no token was sampled"),
        (side(RECORD, times_sent=2), "2.1"),
        (side({**RECORD, "ok": False, "errors": ["the server went away"]}), "went away"),
        (side(rollout(([1, 9, 3], [False] * 3), ([4, 5, 6], [True, True, False]))), r"other tokens in 1, .* \[0\]"),
        (side(), "PyPI's renderers rendered 2 turns, this project 0"),
    ],
    ids=["mismatch", "nan", "no tokens", "images twice", "failed rollout", "other tokens", "missing rollout"],
)  # fmt: skip
def test_each_violation_is_found(ours, found):
    (line,) = violations(side(RECORD), ours)
    assert re.search(found, line)
