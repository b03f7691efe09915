"""A fleet is several engines behind one `Engine`: a session stays on one, and moves when that one fails."""

from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.fleet.limits import FleetLimits
from rollouts.engines.fleet.member import MemberStatus

__all__ = ["EngineFleet", "FleetLimits", "MemberStatus"]
