"""The versions of the weights in the order in which they came into use, and the staleness of episodes.

Versions are names: "10" is not newer than "9" because of its digits, but because it came into use later.
"""

import logging
from collections.abc import Callable, Sequence

from rollouts.errors import ArgumentError
from rollouts.trajectory.tree import Trajectory

log = logging.getLogger("rollouts.runner")


class VersionHistory:
    """The versions that have been in use, the oldest first; the last is in use now.

    `reported` returns the version that the engine reports. One that is not known is in use from when it is
    reported, with a warning unless it is `expected`: another process has set it. Where the engine reports
    none, an unknown version of a token becomes the newest. Any other version that is not known was in use
    before this run.
    """

    def __init__(self, first: str, reported: Callable[[], str] | None = None) -> None:
        self._places = {first: 0}
        self._used = {first}  # by this process
        self._first = self._current = first
        self._reported = reported or (lambda: self._current)
        self.expected = ""  # the version of the update that is under way

    @property
    def current(self) -> str:
        """The version in use."""
        self.adopt_reported()
        return self._current

    @property
    def versions(self) -> tuple[str, ...]:
        """All versions, the oldest first: the argument `versions` of `rollouts.training.sample_staleness`."""
        return tuple(sorted(self._places, key=self._places.__getitem__))

    def check_new(self, version: str) -> None:
        """Raises `ArgumentError` for a version that this run has used: its tokens would be of two sets of weights."""
        if version in self._used:
            rule = f"it has been in use (the last version is {self._current!r:.80}); give every update a new version"
            raise ArgumentError("version", version, rule)

    def start_using(self, version: str) -> None:
        """Record that `version` is in use now. A version that is in use already stays in its place."""
        if version in self._used:
            return
        # One that an earlier process used after the current version keeps its place.
        if self._places.get(version, -1) <= self._places[self._current]:
            self._places[version] = max(self._places.values()) + 1
        self._used.add(version)
        self._current = version

    def restore(self, versions: Sequence[str]) -> None:
        """Take over the order of the versions that earlier processes of the run have used, before any is compared.

        The version in use keeps its place among them. Later ones may come into use again, when their weights
        are loaded again; a token of such a version is not older than those weights, and a warning says so.
        Where the engine reports no version, as one that only workers have, the last of `versions` counts as
        the one in use until a token has another.
        """
        order = list(dict.fromkeys(versions))
        if not self._current and order:
            self._current = order[-1]
        if self._current not in order:
            order.append(self._current)
        here = order.index(self._current)
        if later := order[here + 1 :]:
            log.warning(
                "the engine begins with weights %.80r, and earlier processes of this run have used %.80r "
                "after them: groups that these have sampled are not too old, though the engine's weights "
                "may be others. Load the last checkpoint and pass its version, as in "
                "LocalEngine.from_pretrained(..., weight_version=%.80r)",
                self._current,
                later[-1],
                later[-1],
            )
        self._places = {version: index - here for index, version in enumerate(order)}

    def place(self, version: str) -> int:
        """The place of a version: newer ones have larger places, 0 is the first of this run, earlier ones are below."""
        self.adopt_reported()
        if version not in self._places:
            if version == self.expected:  # sampled before the call for the update has returned
                self._places[version] = max(self._places.values()) + 1
            elif self._reported() == "":
                self.start_using(version)
            else:
                log.warning(
                    "tokens of weights %.80r are from before this run, in which %.80r came first; their order is "
                    "unknown, and they count as the oldest. Begin with an engine that has the version of the last "
                    "checkpoint",
                    version,
                    self._first,
                )
                self._places[version] = min(self._places.values()) - 1
        return self._places[version]

    @property
    def current_place(self) -> int:
        """The place of the version in use. It grows by 1 with each update."""
        return self._places[self.current]

    def name_of(self, place: int) -> str:
        """The version at a place that `place` returned."""
        return next(version for version, known in self._places.items() if known == place)

    def adopt_reported(self) -> None:
        """Start using the version that the engine reports, which has it before its call for the update returns."""
        version = self._reported()
        if version != self._current and version not in self._used:
            if version != self.expected:
                log.warning("the engine has weights of version %.80r, which this runner has not set", version)
            self.start_using(version)


def oldest_place(episode: Trajectory, history: VersionHistory, began: int) -> int | None:
    """The place of the oldest version that sampled a token of an episode; None for one without sampled tokens.

    `began` is the place of the version that was in use when the episode began. A token whose version the
    engine has not reported counts as sampled by that one: it cannot be older.
    """
    versions: dict[str, None] = {}  # in the order of the nodes
    lacks_some = False
    for node in episode.nodes:
        spans = [span for span in node.weight_spans if span.end > span.start]
        versions.update(dict.fromkeys(span.version for span in spans))
        lacks_some = lacks_some or sum(span.end - span.start for span in spans) < len(node.logprobs)
    places = [history.place(version) for version in versions]
    return min([*places, began] if lacks_some else places, default=None)


def staleness(history: VersionHistory, place: int | None) -> int:
    """How many updates the version at `place` is behind the one in use; 0 where no token was sampled."""
    return 0 if place is None else max(0, history.current_place - place)
