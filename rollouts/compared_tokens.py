"""The log-probabilities of sampler and trainer for each trained token, side by side."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from rollouts.version_order import VersionOrder
from transport import wire_type

_no_floats, _no_integers = partial(np.empty, 0, np.float32), partial(np.empty, 0, np.int32)


@wire_type("rollouts.ComparedTokens")
@dataclass(frozen=True, slots=True, eq=False)
class ComparedTokens:
    """The n trained tokens of a batch, in the order of samples and positions. Every array is (n,).

    `sampler` and `trainer` float32, log-probabilities in nats. The others are int32: `sample`, an index into
    `names`; `position` in the sample; `turn`, the number of the run of trained tokens in the sample, from 0;
    `item`, the last image, video or sound before the token, an index into `media_hashes` and
    `media_modalities`, -1 where there is none; `version`, an index into `versions`, -1 where it is not known.
    """

    sampler: np.ndarray = field(default_factory=_no_floats)
    trainer: np.ndarray = field(default_factory=_no_floats)
    sample: np.ndarray = field(default_factory=_no_integers)
    position: np.ndarray = field(default_factory=_no_integers)
    turn: np.ndarray = field(default_factory=_no_integers)
    item: np.ndarray = field(default_factory=_no_integers)
    version: np.ndarray = field(default_factory=_no_integers)
    names: tuple[str, ...] = ()
    media_hashes: tuple[str, ...] = ()
    media_modalities: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.sampler)

    @property
    def difference(self) -> np.ndarray:
        """trainer - sampler, float64 (n,). Infinite where it is not a number, so that it exceeds every threshold."""
        with np.errstate(invalid="ignore"):
            difference = self.trainer.astype(np.float64) - self.sampler.astype(np.float64)
        return np.where(np.isnan(difference), np.inf, difference)

    def sampled_by(self, version: str | None) -> np.ndarray:
        """Whether the weights `version` have sampled a token, bool (n,). True where either is not known."""
        names = [version is None or each == version for each in self.versions]
        sampled: np.ndarray = np.array([*names, True])[self.version]
        return sampled

    def modality(self) -> np.ndarray:
        """The modality of `item` for each token, text (n,): "text" where no medium is before the token."""
        modality: np.ndarray = np.array([*self.media_modalities, "text"])[self.item]
        return modality

    def lag(self, trainer_version: str | None = None) -> np.ndarray | None:
        """How many versions older than the trainer's weights those of each token are, int64 (n,).

        The trainer's version is `trainer_version`, or the newest of the tokens. None where a version is not
        known or no integer: then the order of the versions is not known.
        """
        if not len(self) or (self.version < 0).any():
            return None
        order = VersionOrder()
        places = [place for version in self.versions if (place := order.place(version)) is not None]
        if len(places) < len(self.versions):
            return None
        sampled = np.array(places, dtype=np.int64)[self.version]
        newest = int(sampled.max()) if trainer_version is None else order.place(trainer_version)
        return None if newest is None else newest - sampled
