# SPDX-License-Identifier: Apache-2.0
"""A snapshot says what a stream of KV events came to, and a replay always reaches back to one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)

from rbln_vllm.core.event_stream import EpochPublisher, Residency

SIZE = 4


def stored(names: Sequence[int], parent: int | None = None, medium: str = "GPU") -> BlockStored:
    """Each granule's tokens are its name."""
    tokens = [name for name in names for _ in range(SIZE)]
    return BlockStored(
        block_hashes=list(names),
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=SIZE,
        lora_id=None,
        medium=medium,
        lora_name=None,
        extra_keys=[(str(name),) for name in names],
        group_idx=0,
    )


def removed(*names: int, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved(block_hashes=list(names), medium=medium, group_idx=0)


class Follower:
    """A subscriber: what is held, by name; fails when a parent has not been announced."""

    def __init__(self) -> None:
        self.held: dict[tuple[str | None, int], tuple[int | None, tuple[int, ...]]] = {}
        self.announced: set[tuple[str | None, int]] = set()

    def apply(self, events: Sequence[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.held[event.medium, int(name)]
            else:
                self.held.clear()

    def _store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        assert len(event.token_ids) == event.block_size * len(event.block_hashes)
        for index, name in enumerate(event.block_hashes):
            key = (event.medium, int(name))
            assert parent is None or (event.medium, int(parent)) in self.announced
            assert event.extra_keys is not None
            assert event.extra_keys[index] == (str(name),)
            tokens = event.token_ids[index * SIZE : (index + 1) * SIZE]
            self.held[key] = (None if parent is None else int(parent), tuple(tokens))
            self.announced.add(key)
            parent = name


def told_by(residency: Residency) -> Follower:
    """One that knows the snapshot alone."""
    follower = Follower()
    follower.apply(residency.snapshot())
    return follower


class TestResidency:
    def test_snapshot_begins_anew(self) -> None:
        assert Residency().snapshot() == [AllBlocksCleared()]

    def test_chain_of_one_event(self) -> None:
        residency = Residency()
        residency.apply([stored([1, 2, 3]), removed(3)])
        assert told_by(residency).held == {
            ("GPU", 1): (None, (1,) * SIZE),
            ("GPU", 2): (1, (2,) * SIZE),
        }

    def test_removed_parent_is_told_of_while_its_child_is_held(self) -> None:
        residency = Residency()
        residency.apply([stored([1, 2]), removed(1)])
        assert told_by(residency).held.keys() == {("GPU", 2)}
        residency.apply([removed(2)])
        assert residency.snapshot() == [AllBlocksCleared()]

    def test_parent_that_comes_back(self) -> None:
        residency = Residency()
        residency.apply([stored([1, 2]), removed(1), stored([1]), removed(2)])
        assert told_by(residency).held.keys() == {("GPU", 1)}

    def test_media_are_apart(self) -> None:
        residency = Residency()
        residency.apply([stored([1]), stored([1], medium="CPU"), removed(1)])
        assert told_by(residency).held.keys() == {("CPU", 1)}

    def test_clear(self) -> None:
        residency = Residency()
        residency.apply([stored([1]), AllBlocksCleared(), stored([2])])
        assert told_by(residency).held.keys() == {("GPU", 2)}

    @pytest.mark.parametrize("seed", range(20))
    def test_random_stream_and_its_snapshot_say_the_same(self, seed: int) -> None:
        generator = random.Random(seed)
        residency, follower = Residency(), Follower()
        for events in random_stream(generator, steps=150):
            residency.apply(events)
            follower.apply(events)
            assert told_by(residency).held == follower.held
        # Nothing is kept for ever.
        names = [name for _, name in follower.held]
        residency.apply([removed(name) for name in generator.sample(names, len(names))])
        assert residency.snapshot() == [AllBlocksCleared()]


def random_stream(generator: random.Random, steps: int) -> Iterator[list[KVCacheEvent]]:
    """Chains that grow, branch, lose any granule and get it back; rarely all is cleared."""
    parents: dict[int, int | None] = {}
    held: set[int] = set()
    for number in range(steps):
        choice = generator.random()
        if choice < 0.01:
            held.clear()
            yield [AllBlocksCleared()]
        elif choice < 0.5 or not held:
            first = 3 * number + 1
            names = list(range(first, first + generator.randint(1, 3)))
            parent = generator.choice([None, *sorted(held)])
            parents |= dict(zip(names, [parent, *names[:-1]], strict=True))
            held |= set(names)
            yield [stored(names, parent)]
        elif choice < 0.6:
            # A granule that was removed comes back if its parent is held.
            back = [n for n, p in parents.items() if n not in held and (p is None or p in held)]
            names = [generator.choice(back)] if back else []
            held |= set(names)
            yield [stored([name], parents[name]) for name in names]
        else:
            name = generator.choice(sorted(held))
            held.discard(name)
            yield [removed(name)]


class Client:
    """A live subscription and a way to ask for a replay."""

    def __init__(self, live: zmq.Socket[bytes], replay: zmq.Socket[bytes]) -> None:
        self.live, self.replay = live, replay

    def messages(self, count: int) -> list[tuple[int, list[KVCacheEvent]]]:
        """The next `count` that are published."""
        return [self._decoded(*self.live.recv_multipart()[1:]) for _ in range(count)]

    def replayed(self, first: int) -> list[tuple[int, list[KVCacheEvent]]]:
        """All that are kept, from number `first` on."""
        self.replay.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while (frames := self.replay.recv_multipart()[-2:])[0] != EpochPublisher.END_SEQ:
            found.append(self._decoded(*frames))
        return found

    @staticmethod
    def _decoded(sequence: bytes, payload: bytes) -> tuple[int, list[KVCacheEvent]]:
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        return int.from_bytes(sequence, "big"), list(batch.events)


STEPS = 4


@pytest.fixture
def publisher(request: pytest.FixtureRequest) -> Iterator[EpochPublisher]:
    name = f"inproc://{request.node.name}"
    publisher = EpochPublisher(
        0, endpoint=name, replay_endpoint=f"{name}-replay", buffer_steps=STEPS
    )
    yield publisher
    publisher.shutdown()


@pytest.fixture
def client(publisher: EpochPublisher) -> Iterator[Client]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    config = publisher.get_publisher_config()
    live, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    for socket in (live, replay):
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
    live.setsockopt(zmq.SUBSCRIBE, b"")
    live.connect(config.endpoint)
    replay.connect(str(config.replay_endpoint))
    yield Client(live, replay)
    live.close(linger=0)
    replay.close(linger=0)


def publish(publisher: EpochPublisher, *events: KVCacheEvent) -> None:
    publisher.publish(KVEventBatch(ts=0.0, events=list(events)))


class TestEpochs:
    def test_numbers_start_anew_when_the_buffer_is_full(
        self, publisher: EpochPublisher, client: Client
    ) -> None:
        for name in range(1, STEPS + 2):
            publish(publisher, stored([name], name - 1 or None))
        messages = client.messages(STEPS + 2)
        assert [number for number, _ in messages] == [*range(STEPS), 0, 1]
        follower = Follower()
        follower.apply(messages[STEPS][1])
        assert follower.held.keys() == {("GPU", name) for name in range(1, STEPS + 1)}

    def test_replay_reaches_back_to_all_that_is_held(
        self, publisher: EpochPublisher, client: Client
    ) -> None:
        follower = Follower()
        for name in range(1, 5 * STEPS):
            publish(publisher, stored([name], name - 1 or None))
            follower.apply([stored([name], name - 1 or None)])
            (_, events), *_ = client.messages(1)
            if events[0] == AllBlocksCleared():
                client.messages(1)  # the one that was just published
            late = Follower()
            replayed = client.replayed(0)
            assert [number for number, _ in replayed] == list(range(len(replayed)))
            assert len(replayed) <= STEPS
            for _, events in replayed:
                late.apply(events)
            assert late.held == follower.held

    def test_snapshot_carries_the_rank(self) -> None:
        publisher = EpochPublisher(3, endpoint="inproc://rank", buffer_steps=2)
        _, payload = publisher.start_epoch([AllBlocksCleared()])
        publisher.shutdown()
        assert msgspec.msgpack.decode(payload, type=KVEventBatch).data_parallel_rank == 3

    def test_too_short_a_buffer_is_refused(self) -> None:
        with pytest.raises(ValueError, match="must be at least 2"):
            EpochPublisher(0, endpoint="inproc://short", buffer_steps=1)
