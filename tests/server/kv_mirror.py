# SPDX-License-Identifier: Apache-2.0
"""What a router can know of a server: an index built from its KV event messages and nothing else.

Messages are read as MessagePack, by names of fields and not by vLLM's classes, as others read them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
DEADLINE_S = 60


@dataclass(frozen=True)
class Granule:
    """The tokens that one hash stands for."""

    parent: int | bytes | None
    tokens: tuple[int, ...]
    extra_keys: Sequence[Any] | None

    def __post_init__(self) -> None:
        assert self.tokens, "a hash stands for tokens"


@dataclass
class Mirror:
    """The granules a server holds.

    Fails when an event breaks the rules a router relies on: every granule has `size` tokens, is
    stored once before it is removed once, and its parent was announced before it.
    """

    size: int
    held: dict[int | bytes, Granule] = field(default_factory=dict)
    removed: int = 0
    cleared: int = 0
    _announced: set[int | bytes] = field(default_factory=set)

    def apply(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Take in one message."""
        for event in events:
            match event["type"]:
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    self._remove(event)
                case "AllBlocksCleared":
                    self.held.clear()
                    self.cleared += 1
                case unknown:
                    raise AssertionError(f"no router knows {unknown}")

    def hit_tokens(self, prompt: Sequence[int]) -> int:
        """How many tokens of `prompt` the server need not compute; the last one it always must."""
        children = {(one.parent, one.tokens): hash_ for hash_, one in self.held.items()}
        parent: int | bytes | None = None
        hits = 0
        while hits + self.size < len(prompt):
            tokens = tuple(prompt[hits : hits + self.size])
            parent = children.get((parent, tokens))
            if parent is None:
                break
            hits += self.size
        return hits

    def chain(self, prompt: Sequence[int]) -> list[int | bytes]:
        """The hashes of the leading granules of `prompt` that are held."""
        children = {(one.parent, one.tokens): hash_ for hash_, one in self.held.items()}
        found: list[int | bytes] = []
        for start in range(0, len(prompt) - self.size + 1, self.size):
            tokens = tuple(prompt[start : start + self.size])
            hash_ = children.get((found[-1] if found else None, tokens))
            if hash_ is None:
                break
            found.append(hash_)
        return found

    def _store(self, event: Mapping[str, Any]) -> None:
        hashes, tokens = event["block_hashes"], event["token_ids"]
        assert (event["block_size"], event["medium"]) == (self.size, "GPU")
        assert len(tokens) == self.size * len(hashes)
        extra_keys = event.get("extra_keys") or [None] * len(hashes)
        parent = event["parent_block_hash"]
        for number, hash_ in enumerate(hashes):
            assert parent is None or parent in self._announced, "parents come before children"
            assert hash_ not in self.held, "what is held is not stored again"
            own = tuple(tokens[number * self.size : (number + 1) * self.size])
            self.held[hash_] = Granule(parent, own, extra_keys[number])
            self._announced.add(hash_)
            parent = hash_

    def _remove(self, event: Mapping[str, Any]) -> None:
        assert event["medium"] == "GPU"
        for hash_ in event["block_hashes"]:
            assert hash_ in self.held, "only what is held is removed"
            del self.held[hash_]
            self.removed += 1


class Subscriber:
    """Follows one server for the time of a `with` block, from its first message on."""

    def __init__(self, endpoint: str, replay_endpoint: str, size: int) -> None:
        self.mirror = Mirror(size)
        self.next_sequence = 0
        self.epoch = 0
        self._endpoints = endpoint, replay_endpoint

    def __enter__(self) -> Subscriber:
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._live.connect(self._endpoints[0])
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def follow_until(self, prompt: Sequence[int], hits: int) -> None:
        """Take in messages until the mirror predicts `hits` tokens for `prompt`.

        With a prompt nobody has sent before, everything earlier has then arrived too.
        """
        end = time.monotonic() + DEADLINE_S
        while self.mirror.hit_tokens(prompt) != hits:
            assert time.monotonic() < end, f"{self.mirror.hit_tokens(prompt)} and not {hits}"
            self.poll()

    def poll(self) -> bool:
        """Take in one message; False when there is none within a tenth of a second."""
        if not self._live.poll(100):
            return False
        _, sequence, payload = self._live.recv_multipart()
        self._take(int.from_bytes(sequence, "big"), payload)
        return True

    def _take(self, sequence: int, payload: bytes) -> None:
        if sequence < self.next_sequence:  # numbers start anew, with all that is held
            self.next_sequence = 0
            self.epoch += 1
        if sequence > self.next_sequence:  # a late or slow subscriber
            for missed, old_payload in self._replay(self.next_sequence):
                if missed < sequence:
                    self._apply(missed, old_payload)
        self._apply(sequence, payload)

    def _apply(self, sequence: int, payload: bytes) -> None:
        assert sequence == self.next_sequence, "the replay has no holes"
        _, events, *_ = msgspec.msgpack.decode(payload)
        self.mirror.apply(events)
        self.next_sequence = sequence + 1

    def _replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        socket = self._context.socket(zmq.DEALER)
        socket.connect(self._endpoints[1])
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            assert socket.poll(DEADLINE_S * 1000), "the replay does not end"
            *_, sequence, payload = socket.recv_multipart()
            if sequence == END_OF_REPLAY:
                break
            yield int.from_bytes(sequence, "big"), payload
        socket.close(linger=0)
