"""Episodes and their images in the object stores of a real Ray cluster, counted in bytes."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from ray_world import image, runner_of, tasks, workers_of

from rollouts import Trajectory
from rollouts.errors import RolloutsError
from rollouts.ray import ObjectMedia, StoredEpisodes, store_episodes

GROUP_SIZE = 4
NUM_TASKS = 6


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 100))


class ForgettingMedia(ObjectMedia):
    """Finds nothing that this process has: what the bytes would be without `ObjectMedia`."""

    def put(self, sources):
        return ObjectMedia().put(sources)

    async def receive(self, digests, fetch):
        return await ObjectMedia().receive(digests, fetch)


async def episodes_of(directory: Path, media: ObjectMedia) -> list[Trajectory]:
    options = {"group_size": GROUP_SIZE}
    workers = workers_of(directory)
    workers.media = media
    async with workers, runner_of(workers, **options) as runner:
        groups = [group async for group in runner.stream(tasks(NUM_TASKS))]
    return [episode for group in groups for episode in group.episodes]


def bytes_and_episodes(cluster, directory: Path, media: ObjectMedia) -> tuple[int, list[Trajectory]]:
    """The bytes that a run wrote into all object stores, and its episodes."""
    before = sum(cluster.bytes_written().values())
    episodes = run(episodes_of(directory, media))
    return sum(cluster.bytes_written().values()) - before, episodes


@pytest.mark.contract
def test_an_image_is_written_once_on_each_node_that_uses_it(cluster, tiny_model_dir):
    written, episodes = bytes_and_episodes(cluster, tiny_model_dir, ObjectMedia())
    assert len(episodes) == NUM_TASKS * GROUP_SIZE
    sizes = {one.source.digest: one.source.nbytes for episode in episodes for one in episode.all_media()}
    assert len(sizes) == NUM_TASKS + len(episodes)
    of_tasks = sum(sizes[task.data["image"].digest] for task in tasks(NUM_TASKS))
    of_steps = sum(sizes.values()) - of_tasks
    # Those of tasks are written where the runner is, and read on two nodes; the others go from a node to the runner.
    assert written <= 1.1 * (3 * of_tasks + 2 * of_steps)


def test_without_object_media_images_are_written_again_and_again(cluster, tiny_model_dir):
    written, episodes = bytes_and_episodes(cluster, tiny_model_dir, ForgettingMedia())
    sizes = {one.source.digest: one.source.nbytes for episode in episodes for one in episode.all_media()}
    assert written > 1.1 * 3 * sum(sizes.values())


def is_shared_memory(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(each, 16) for each in line.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return "/plasma" in line
    return False


def test_memory_of_this_process_is_not_shared_memory():
    assert not is_shared_memory(address_of(bytes(1 << 20)))


def address_of(data: object) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def trajectories(count: int) -> list[Trajectory]:
    """Episodes without turns whose messages hold images, and a large array."""
    from rollouts import TokenNode

    made = []
    for number in range(count):
        trajectory = Trajectory(f"e{number}", seed=number)
        size = 100_000
        node = TokenNode(
            -1,
            np.arange(size, dtype=np.int32),
            np.zeros(size, bool),
            np.zeros(0, np.float32),
            messages=({"role": "user", "content": [{"type": "image", "image": image(number % 2)}]},),
        )
        trajectory.nodes = [node]
        made.append(trajectory)
    return made


class Reader:
    """An actor on another node than the one that stored the episodes."""

    def read(self, stored: StoredEpisodes) -> tuple[list[str], list[int], bool]:
        episodes = stored.load()
        images = [episode.nodes[0].messages[0]["content"][0]["image"] for episode in episodes]
        arrays = [episode.nodes[0].token_ids for episode in episodes]
        addresses = [address_of(source.data) for source in images] + [address_of(array) for array in arrays]
        return (
            [each.digest for each in images],
            [int(array.sum()) for array in arrays],
            all(map(is_shared_memory, addresses)),
        )

    def store(self) -> StoredEpisodes:
        return store_episodes(trajectories(2), ObjectMedia())


def test_stored_episodes_are_views_of_the_shared_memory_of_the_node_that_reads_them(cluster):
    import ray

    media, before = ObjectMedia(), sum(cluster.bytes_written().values())
    episodes = trajectories(4)
    stored = [store_episodes(episodes[:2], media), store_episodes(episodes[2:], media)]
    assert [each.num_episodes for each in stored] == [2, 2]
    reader = ray.remote(Reader).remote()
    for each in stored:
        digests, sums, is_shared = ray.get(reader.read.remote(each))
        assert digests == [image(0).digest, image(1).digest]
        assert sums == [sum(range(100_000))] * 2
        assert is_shared
    arrays = sum(episode.nodes[0].token_ids.nbytes + episode.nodes[0].sampled.nbytes for episode in episodes)
    images = image(0).nbytes + image(1).nbytes
    assert sum(cluster.bytes_written().values()) - before <= 1.1 * 2 * (arrays + images)


def test_episodes_of_a_process_that_has_ended_are_an_error_that_says_so(cluster):
    import ray

    writer = ray.remote(Reader).remote()
    stored = ray.get(writer.store.remote())
    ray.kill(writer)
    with pytest.raises(RolloutsError, match="must run until they have been loaded"):
        stored.load()
