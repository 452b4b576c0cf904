# SPDX-License-Identifier: Apache-2.0
"""vLLM's publisher of KV events, made so that who joins late can learn everything.

Upstream keeps the last ``buffer_steps`` messages for replay. What was stored before them is never
told again, and vllm-router takes nothing of a replay that does not reach back to message 0.
So here the numbers start anew whenever the buffer is full, with a message 0 that says all that is
held: a replay always reaches back to it. To a subscriber this looks like a server that restarts,
which it must follow anyway; the message begins with ``AllBlocksCleared``, so that a subscriber
that does not look at numbers is right too.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")

# A hash names one thing per medium and group.
Name = tuple[str | None, int | None, int | bytes]


@dataclass
class _Stored:
    """One hash as it was announced; ``children`` counts announced hashes that follow it."""

    event: BlockStored
    parent: Name | None
    held: bool = True
    children: int = 0


@dataclass
class Residency:
    """What a stream of events says is held, and how to say it again from the start.

    A parent that was removed is kept while children of it are held: a subscriber must have heard
    of it to place them.
    """

    _stored: dict[Name, _Stored] = field(default_factory=dict)

    def apply(self, events: Sequence[KVCacheEvent]) -> None:
        """Takes in events in the order in which they were published."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self._stored.clear()

    def snapshot(self) -> list[KVCacheEvent]:
        """Events after which a subscriber that knows nothing, or anything, knows what is held."""
        events: list[KVCacheEvent] = [AllBlocksCleared()]
        events += [stored.event for stored in self._stored.values()]
        for (medium, group, name), stored in self._stored.items():
            if not stored.held:
                events.append(BlockRemoved(block_hashes=[name], medium=medium, group_idx=group))
        return events

    def _store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        for index, name in enumerate(event.block_hashes):
            key = (event.medium, event.group_idx, name)
            known = self._stored.get(key)
            if known is None:
                self._add(key, _part(event, index, parent))
            else:
                known.held = True
            parent = name

    def _add(self, key: Name, event: BlockStored) -> None:
        hash_ = event.parent_block_hash
        parent = None if hash_ is None else (event.medium, event.group_idx, hash_)
        if parent in self._stored:
            self._stored[parent].children += 1
        else:
            parent = None
        self._stored[key] = _Stored(event, parent)

    def _remove(self, event: BlockRemoved) -> None:
        for name in event.block_hashes:
            key: Name | None = (event.medium, event.group_idx, name)
            if key in self._stored:
                self._stored[key].held = False
            while key in self._stored and not self._is_needed(self._stored[key]):
                key = self._stored.pop(key).parent
                if key is not None:
                    self._stored[key].children -= 1

    @staticmethod
    def _is_needed(stored: _Stored) -> bool:
        return stored.held or stored.children > 0


def _part(event: BlockStored, index: int, parent: int | bytes | None) -> BlockStored:
    """Returns the event for one hash of an event that may name several."""
    size, keys = event.block_size, event.extra_keys
    changes: dict[str, Any] = {
        "block_hashes": [event.block_hashes[index]],
        "parent_block_hash": parent,
        "token_ids": event.token_ids[index * size : (index + 1) * size],
        "extra_keys": None if keys is None else keys[index : index + 1],
    }
    return msgspec.structs.replace(event, **changes)


class EpochPublisher(ZmqEventPublisher):
    """Starts an epoch, numbered from 0, whenever ``buffer_steps`` messages can be replayed."""

    def __init__(
        self, data_parallel_rank: int, *args: Any, buffer_steps: int = 10_000, **kwargs: Any
    ) -> None:
        if buffer_steps < 2:
            raise ValueError(
                f"buffer_steps of --kv-events-config is {buffer_steps}; it must be at least 2, "
                "for a message that says what is held and one that says what changes"
            )
        super().__init__(data_parallel_rank, *args, buffer_steps=buffer_steps, **kwargs)
        # Nothing is published before this constructor returns.
        self._buffer = _Epoch(self, buffer_steps)

    def start_epoch(self, held: list[KVCacheEvent]) -> tuple[int, bytes]:
        """Publishes message 0; returns it as the buffer keeps it. In the publisher's thread."""
        assert self._pub is not None
        batch = KVEventBatch(ts=time.time(), events=held, data_parallel_rank=self._dp_rank)
        payload = msgspec.msgpack.encode(batch)
        self._pub.send_multipart((self._topic_bytes, (0).to_bytes(8, "big"), payload))
        self._seq_gen = count(1)
        logger.debug("KV events start anew: %d events, %d bytes", len(held), len(payload))
        return 0, payload


class _Epoch(deque[tuple[int, bytes]]):
    """Upstream's replay buffer: its thread appends each message that it has sent."""

    def __init__(self, publisher: EpochPublisher, steps: int) -> None:
        super().__init__()
        self._publisher, self._steps = publisher, steps
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._residency = Residency()

    def append(self, message: tuple[int, bytes]) -> None:
        """Keeps a message; when that fills the buffer, keeps what it all came to instead."""
        super().append(message)
        self._residency.apply(self._decoder.decode(message[1]).events)
        if len(self) >= self._steps:
            self.clear()
            super().append(self._publisher.start_epoch(self._residency.snapshot()))
