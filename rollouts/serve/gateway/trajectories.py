"""Trajectories of sessions as files of one record, and as JSON."""

from __future__ import annotations

import base64
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollouts.serve.gateway.session import Session
from rollouts.trajectory.json_form import trajectory_json
from rollouts.trajectory.token_node import TokenNode
from rollouts.trajectory.tree import Trajectory
from transport import RecordWriter


def snapshot(trajectory: Trajectory) -> Trajectory:
    """The trajectory as it is now; the original may grow meanwhile."""
    return replace(trajectory, nodes=tuple(trajectory.nodes), turns=tuple(trajectory.turns))


def record_file(trajectory: Trajectory) -> bytes:
    """The bytes of a record file with the trajectory, as `RecordWriter` writes it and `read_records` reads it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trajectory.mmr"
        with RecordWriter(path) as out:
            out.append(trajectory)
        return path.read_bytes()


def trajectory_object(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory as a JSON object. An image has its bytes in base64 where it is introduced."""
    return trajectory_json(trajectory, _media_entries)


def _media_entries(node: TokenNode) -> list[dict[str, Any]]:
    return [
        {
            "modality": reference.modality,
            "mm_hash": reference.mm_hash,
            "digest": reference.source.digest,
            "offset": reference.placeholder.offset,
            "length": reference.placeholder.length,
            "base64": base64.b64encode(reference.source.data).decode(),
        }
        for reference in node.media
    ]


def session_object(session: Session, now: float) -> dict[str, Any]:
    """What a session is now. `now` is `time.monotonic()`."""
    trajectory = session.trajectory
    return {
        "session_id": session.id,
        "group_id": trajectory.group_id,
        "seed": trajectory.seed,
        "turns": trajectory.num_turns,
        "branches": len(trajectory.leaves()),
        "forks": trajectory.forks,
        "reward": trajectory.reward,
        "ended": trajectory.finished,
        "delivered": session.is_delivered,
        "requests_in_flight": session.in_flight,
        "idle_seconds": now - session.last_used,
        "estimated_bytes": session.nbytes,
    }
