"""Which member a session goes to."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engines.fleet.limits import FleetLimits
from rollouts.engines.fleet.routing import SessionTable, ranked_members
from rollouts.errors import ArgumentError

SESSIONS = [f"episode-{number}" for number in range(4000)]
EIGHT = [f"http://10.0.0.{number}:8000" for number in range(8)]


def idle(names):
    return dict.fromkeys(names, 0)


def test_sessions_spread_evenly_over_the_members():
    counts = Counter(ranked_members(session, EIGHT)[0] for session in SESSIONS)
    mean = len(SESSIONS) / len(EIGHT)
    assert all(0.85 * mean < counts[name] < 1.15 * mean for name in EIGHT)


@pytest.mark.slow
@given(st.text(), st.lists(st.text(), unique=True, min_size=1), st.text())
def test_a_member_that_leaves_moves_its_own_sessions_only(session, names, leaving):
    rest = [name for name in names if name != leaving]
    order = ranked_members(session, names)
    assert ranked_members(session, rest) == [name for name in order if name != leaving]


@pytest.mark.slow
def test_the_order_is_the_same_in_another_process():
    code = f"from rollouts.engines.fleet.routing import ranked_members; print(ranked_members('episode-1', {EIGHT}))"
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == str(ranked_members("episode-1", EIGHT))


def test_a_new_session_passes_over_an_overloaded_member_and_stays_where_it_went():
    table = SessionTable(FleetLimits(spill_requests=2))
    preferred, second = ranked_members("s", EIGHT)[:2]
    assert table.member_of("s", "r", idle(EIGHT) | {preferred: 100}) == second
    assert table.member_of("s", "r", idle(EIGHT)) == second


def test_sessions_stay_where_they_are_when_members_are_added():
    table = SessionTable(FleetLimits())
    before, after = [
        [table.member_of(session, "r", idle(members)) for session in SESSIONS[:60]] for members in (EIGHT[:3], EIGHT)
    ]
    assert before == after


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.text())
def test_no_new_session_goes_to_a_member_above_the_bound(loads, session):
    limits = FleetLimits(spill_requests=3, spill_ratio=1.0)
    by_name = {f"m{number}": load for number, load in enumerate(loads)}
    chosen = SessionTable(limits).member_of(session, "r", by_name)
    assert len(loads) == 1 or by_name[chosen] <= max(3, sum(loads) / len(loads))


def test_the_table_of_sessions_is_bounded():
    table = SessionTable(FleetLimits(sessions=10))
    for session in SESSIONS[:100]:
        table.member_of(session, "r", idle(EIGHT))
    assert len(table._members) == 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("check_seconds", 0),
        ("check_timeout", float("inf")),
        ("wait_seconds", -1),
        ("eject_after", 0),
        ("failovers", -1),
        ("failovers", 1.5),
        ("spill_ratio", 0.9),
        ("sessions", True),
    ],
)
def test_a_wrong_limit_is_refused_by_its_name(name, value):
    with pytest.raises(ArgumentError, match=name):
        FleetLimits(**{name: value})
