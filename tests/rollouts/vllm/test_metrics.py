"""The text of `/metrics`, read into numbers."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engines.vllm.metrics import ServerMetrics
from rollouts.errors import CapabilityError, MalformedResultError

TWO_ENGINES = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:num_preemptions_total{engine="0",model_name="m"} 5.0
vllm:num_preemptions_total{engine="1",model_name="m"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.2e+03

process_start_time_seconds 1.7952558715e+09
"""


def test_counts_add_up_over_the_engines_of_a_server():
    metrics = ServerMetrics.parse(TWO_ENGINES)
    assert (metrics.running, metrics.waiting, metrics.preemptions) == (7, 2, 6)
    assert metrics.total("vllm:prompt_tokens_total") == 1200
    assert metrics.process_start_time == 1795255871.5


def test_a_metric_that_is_not_reported_is_an_error_and_not_zero():
    metrics = ServerMetrics.parse('vllm:num_requests_running{engine="0"} 1\n')
    with pytest.raises(CapabilityError, match="vllm:num_requests_waiting"):
        _ = metrics.waiting
    assert metrics.process_start_time is None


@pytest.mark.parametrize(
    "line",
    [
        "a b",
        'a{x="1"',
        'a{x="1"y="2"} 3',
        '{x="1"} 2',
        "a 1 2 3",
        'key{of="me"} Bearer sk-secret',
    ],
)
def test_the_error_quotes_a_line_of_another_format(line):
    with pytest.raises(MalformedResultError) as caught:
        ServerMetrics.parse(f"good 1\n{line}\n")
    assert line.replace("Bearer sk-secret", "") in str(caught.value)
    assert "sk-secret" not in str(caught.value)


NAMES = st.text(string.ascii_letters + "_", min_size=1, max_size=8)


@given(
    st.lists(
        st.tuples(NAMES, st.dictionaries(NAMES, st.text(max_size=12), max_size=3), st.floats(allow_nan=False)),
        max_size=8,
    )
)
def test_all_written_labels_and_values_are_read_back(samples):
    def escaped(text):
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    lines = []
    for name, labels, value in samples:
        inside = ",".join(f'{key}="{escaped(text)}"' for key, text in labels.items())
        lines.append(f"{name}{{{inside}}} {value!r}" if labels else f"{name} {value!r}")
    metrics = ServerMetrics.parse("\n".join(lines))
    for name in metrics:
        expected = [(labels, value) for other, labels, value in samples if other == name]
        assert [(dict(sample.labels), sample.value) for sample in metrics[name]] == expected
    assert set(metrics) == {name for name, _, _ in samples}
