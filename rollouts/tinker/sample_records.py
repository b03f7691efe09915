"""Sampled sequences as trajectories: prompts of one session that extend each other are one tree of tokens."""

import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from renderers import MediaSource, MultiModalData, RenderedTokens
from rollouts.engines.protocol import Completion, FinishReason, WeightSpan
from rollouts.errors import TrajectoryError
from rollouts.tinker.requests import ModelInput, SampledSequence, SampleRequest, SampleResult
from rollouts.trajectory.tree import Trajectory
from transport import RecordWriter, TransportError

log = logging.getLogger("rollouts.tinker")

#: Estimated bytes of a token and of a turn without tokens.
_TOKEN_BYTES: Final = 16
_TURN_BYTES: Final = 2500
#: A turn is compared with all nodes of its tree.
_MAX_TURNS: Final = 1024


class _Key(NamedTuple):
    """The first prompt of a tree: how many tokens it has, and the digest of these and of its media."""

    session_id: str
    length: int
    digest: bytes


@dataclass(slots=True)
class _Tree:
    trajectory: Trajectory
    began: float
    used: float
    nbytes: int = 0


class SampleRecords:
    """Appends the sampled sequences of sessions to a record file, one trajectory for each tree of prompts.

        records = SampleRecords("tinker-out/trajectories.mmr", decode=tokenizer.decode)
        records.sampled(session_id, request, result, weight_version)
        records.ended(session_id)

    A prompt that begins with the first prompt of a tree of its session, images included, belongs to that
    tree: as a further turn where it continues a sampled sequence, and as a branch where it does not. Several
    sequences of one prompt are branches. `decode` makes the text of a sequence from its ids; without it turns
    have no text.

    A tree is written when its session ends, when it was not used for `idle_seconds`, when it has 1,024 turns,
    and as the one that was used least recently where all together take about `max_bytes`; a prompt that would
    extend it later begins another one. A process that is killed loses the trees that it has not written. What
    cannot be written is logged, and sampling goes on. Threads may share it.

    Raises for the file what `RecordWriter` raises.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        decode: Callable[[list[int]], str] | None = None,
        idle_seconds: float = 600.0,
        max_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._idle_seconds = idle_seconds
        self._max_bytes = max_bytes
        self._decode = decode
        self._clock = clock
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._writer = RecordWriter(path)
        self._lock = threading.Lock()
        self._trees: OrderedDict[_Key, _Tree] = OrderedDict()  # the one that was used last is the last
        self._lengths: dict[str, Counter[int]] = {}  # by session, of the first prompts of its trees
        self._sources: WeakValueDictionary[str, MediaSource] = WeakValueDictionary()
        self._nbytes = 0
        self._begun = 0

    def sampled(
        self,
        session_id: str,
        request: SampleRequest,
        result: SampleResult,
        weight_version: str,
    ) -> None:
        """Record the sequences of a request, unless it samples a token to score its prompt alone."""
        if request.scores_prompt and request.max_tokens in (0, 1):
            return
        with self._lock:
            self._write_idle()
            key, tree = self._tree(session_id, request.prompt)
            before = len(tree.trajectory.nodes)
            try:
                prompt = self._rendered(request.prompt)
                for number, sequence in enumerate(result.sequences):
                    self._add(tree.trajectory, prompt, number, sequence, weight_version)
            except TrajectoryError as error:
                log.error("a sample of session %s is not recorded: %s", session_id, error)
            self._count(tree, before)
            if len(tree.trajectory.turns) >= _MAX_TURNS or not tree.trajectory.turns:
                self._write(key)
            while self._nbytes > self._max_bytes and self._trees:
                self._write(next(iter(self._trees)))

    def write_idle(self) -> None:
        """Write the trees that were not used for `idle_seconds`; `sampled` does so too."""
        with self._lock:
            self._write_idle()

    def ended(self, session_id: str) -> None:
        """Write the trees of a session."""
        with self._lock:
            for key in [key for key in self._trees if key.session_id == session_id]:
                self._write(key)

    def close(self) -> None:
        """Write all trees and close the file."""
        with self._lock:
            while self._trees:
                self._write(next(iter(self._trees)))
            self._writer.close()

    def _tree(self, session_id: str, prompt: ModelInput) -> tuple[_Key, _Tree]:
        """The tree with the longest first prompt that `prompt` begins with, or a new one."""
        lengths = self._lengths.setdefault(session_id, Counter())
        *known, own = _keys(session_id, prompt, [length for length in lengths if length < len(prompt.token_ids)])
        now = self._clock()
        key = next((key for key in (own, *reversed(known)) if key in self._trees), own)
        if key not in self._trees:
            self._begun += 1
            trajectory = Trajectory(f"{session_id}-{self._begun}", group_id=session_id, started_at=time.time())
            self._trees[key] = _Tree(trajectory, now, now)
            lengths[key.length] += 1
        self._trees.move_to_end(key)
        self._trees[key].used = now
        return key, self._trees[key]

    def _rendered(self, prompt: ModelInput) -> RenderedTokens:
        """The prompt; of equal media files one is kept."""
        media = None
        if prompt.media:
            media = MultiModalData.from_items(
                (replace(item, source=self._sources.setdefault(item.source.digest, item.source)), placeholder)
                for item, placeholder in prompt.media
            )
        return RenderedTokens(prompt.token_ids.tolist(), multi_modal_data=media)

    def _add(
        self,
        trajectory: Trajectory,
        prompt: RenderedTokens,
        number: int,
        sequence: SampledSequence,
        weight_version: str,
    ) -> None:
        ids = sequence.token_ids
        completion = Completion(
            number,
            ids,
            sequence.logprobs,
            FinishReason.STOP if sequence.stopped else FinishReason.LENGTH,
            weight_spans=(WeightSpan(weight_version, 0, len(ids)),),
        )
        text = "" if self._decode is None else self._decode(ids.tolist())
        trajectory.add_turn(prompt, completion, {"role": "assistant", "content": text})

    def _count(self, tree: _Tree, before: int) -> None:
        """Count the nodes from number `before` on; an image as often as trees have it."""
        nodes = tree.trajectory.nodes[before:]
        nbytes = sum(
            _TURN_BYTES + _TOKEN_BYTES * len(node) + sum(one.source.nbytes for one in node.media) for node in nodes
        )
        tree.nbytes += nbytes
        self._nbytes += nbytes

    def _write_idle(self) -> None:
        before = self._clock() - self._idle_seconds
        while self._trees and next(iter(self._trees.values())).used <= before:
            self._write(next(iter(self._trees)))

    def _write(self, key: _Key) -> None:
        """Append a tree to the file, and forget it."""
        tree = self._trees.pop(key)
        self._nbytes -= tree.nbytes
        lengths = self._lengths[key.session_id]
        lengths[key.length] -= 1
        if not lengths[key.length]:
            del lengths[key.length]
        if not lengths:
            del self._lengths[key.session_id]
        trajectory = tree.trajectory
        if not trajectory.turns:  # its only sample was refused
            return
        trajectory.done, trajectory.seconds = True, tree.used - tree.began
        trajectory.finish()
        try:
            self._writer.append(trajectory)
        except (OSError, TransportError) as error:
            log.error("the trajectory %s was not written: %s", trajectory.episode_id, error)


def _keys(session_id: str, prompt: ModelInput, lengths: Sequence[int]) -> Iterator[_Key]:
    """The keys of the beginnings of a prompt with these lengths, ascending, and that of the prompt itself."""
    tokens = np.ascontiguousarray(prompt.token_ids, np.int64)
    hashed, start, media = sha256(), 0, list(prompt.media)
    for length in [*sorted(lengths), len(tokens)]:
        while media and media[0][1].offset < length:
            item, placeholder = media.pop(0)
            hashed.update(tokens[start : placeholder.offset].tobytes())
            hashed.update(repr((item.modality, item.mm_hash, item.source.digest, placeholder)).encode())
            start = placeholder.offset
        hashed.update(tokens[start:length].tobytes())
        start = length
        yield _Key(session_id, length, hashed.digest())
