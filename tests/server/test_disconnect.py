# SPDX-License-Identifier: Apache-2.0
"""A client that goes away ends its own request, in whatever phase, and nobody else's."""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.live import (
    CHUNK,
    MODEL,
    SEQS,
    Brake,
    LiveServer,
    Metrics,
    MissedError,
    prompt,
    tried_again_when_missed,
)

STAY_TOKENS = 200
LONG = 3 * CHUNK + 9


class Visitor:
    """A client that posts a completion and may close its connection at any time.

    Its prompt is never found in the prefix cache, so that it is prefilled in all its chunks.
    """

    def __init__(self, server: LiveServer, asked: Sequence[int], **more: Any) -> None:
        own = {"model": MODEL, "prompt": list(asked), "cache_salt": uuid.uuid4().hex}
        body = {**own, "temperature": 0, "ignore_eos": True, **more}
        self._connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self._response: http.client.HTTPResponse | None = None

    def events(self) -> Iterator[dict[str, Any]]:
        """What a streamed request brings, as it comes."""
        self._response = self._connection.getresponse()
        for line in self._response:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))

    def close(self) -> None:
        """Go away without reading what is left."""
        if self._response is not None:
            self._response.close()
        self._connection.close()


class Others:
    """Requests that stay: their tokens must be what they are without company."""

    def __init__(self, server: LiveServer, number: int) -> None:
        self._server = server
        self._prompts = [prompt(12, seed=100 + i) for i in range(number)]
        self._expected = [server.tokens(each, STAY_TOKENS) for each in self._prompts]
        self._pool = ThreadPoolExecutor(max_workers=max(1, number))
        self._answers: list[Future[list[int]]] = []

    def __enter__(self) -> Others:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def ask(self) -> None:
        self._answers = [
            self._pool.submit(self._server.tokens, each, STAY_TOKENS) for each in self._prompts
        ]

    @property
    def are_answered(self) -> bool:
        return any(answer.done() for answer in self._answers)

    def check(self) -> None:
        assert [answer.result(timeout=60) for answer in self._answers] == self._expected


def prompt_tokens(metrics: Metrics) -> float:
    """Prompt tokens of all requests that have had their first token."""
    return metrics["vllm:prompt_tokens_total"]


def generated_since(start: Metrics, server: LiveServer) -> float:
    """Tokens generated for all requests since the reading `start`."""
    total = "vllm:generation_tokens_total"
    return server.metrics()[total] - start[total]


@dataclass(frozen=True)
class Phase:
    """Where a request is when its client leaves, beside `others` requests that decode."""

    name: str
    others: int
    reached: Callable[[Metrics, Metrics], bool]
    """Of a reading taken before it came, when only the others were there, and one taken now."""

    def __str__(self) -> str:
        return self.name


PHASES = (
    Phase("queued", SEQS, lambda before, now: (now.running, now.waiting) == (SEQS, 1)),
    Phase(
        "prefilling",
        1,
        lambda before, now: now.running == 2 and prompt_tokens(now) == prompt_tokens(before),
    ),
    Phase(
        "decoding",
        2,
        lambda before, now: now.running == 3 and prompt_tokens(now) == prompt_tokens(before) + LONG,
    ),
)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("phase", PHASES, ids=str)
@tried_again_when_missed
def test_only_the_one_who_left_ends(server: LiveServer, phase: Phase, stream: bool) -> None:
    with Others(server, phase.others) as others:
        start = server.metrics()
        with Brake(server) as brake:
            others.ask()
            before = brake.advance_until(
                lambda now: prompt_tokens(now) == prompt_tokens(start) + 12 * phase.others,
                "the others decoding",
            )
            leaver = Visitor(server, prompt(LONG, seed=7), max_tokens=50, stream=stream)
            with closing(leaver):
                brake.advance_until(lambda now: phase.reached(before, now), f"{phase} reached")
            brake.settle()
            if others.are_answered:
                raise MissedError("the others were there for too short a time")
        others.check()
    server.wait_until_idle()
    # The one who left had no further token, but for those of the steps it took to notice.
    assert generated_since(start, server) < STAY_TOKENS * phase.others + 20
    if phase.name != "decoding":
        assert prompt_tokens(server.metrics()) == prompt_tokens(before)


@tried_again_when_missed
def test_the_first_comer_leaves_while_another_is_queued(server: LiveServer) -> None:
    """The seat that is given up goes to the one who waits."""
    with Others(server, SEQS - 1) as others, Brake(server) as brake:
        others.ask()
        leaver = Visitor(server, prompt(12, seed=7), max_tokens=200, stream=True)
        brake.advance_until(lambda now: now.running == SEQS, "all seats taken")
        with ThreadPoolExecutor(max_workers=1) as pool:
            asked = prompt(12, seed=8)
            waiting = pool.submit(server.tokens, asked, 10)
            brake.advance_until(lambda now: now.waiting == 1, "one more waiting")
            leaver.close()
            brake.advance_until(lambda now: now.waiting == 0, "the one who waited admitted")
            if others.are_answered:
                raise MissedError("a seat was free already")
            brake.release()
            answer = waiting.result(timeout=60)
            others.check()
    assert answer == server.tokens(asked, 10)


@tried_again_when_missed
def test_n_choices_when_the_client_leaves_after_the_first_is_done(server: LiveServer) -> None:
    """Every child and the parent are gone, and the same request runs again."""
    # With this seed one child meets its stop string after 27 tokens, the others never.
    sampled = {"n": 4, "temperature": 1.0, "seed": 0, "max_tokens": 200, "stop": ["z"]}
    start = server.metrics()
    begun = prompt_tokens(start) + 4 * 20
    visitor = Visitor(server, prompt(20), stream=True, **sampled)
    done: set[int] = set()
    with Brake(server) as brake, closing(visitor):
        brake.advance_until(lambda now: prompt_tokens(now) == begun, "all begun")
        brake.advance_until(lambda now: now.running == 3, "one child at its end")
        for event in visitor.events():
            done |= {c["index"] for c in event["choices"] if c["finish_reason"]}
            if done:
                break
        assert done == {2}
    server.wait_until_idle()
    assert generated_since(start, server) < 400
    again = server.complete(prompt(20), ignore_eos=True, **sampled)
    assert [choice.index for choice in again.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in again.choices} <= {"stop", "length"}


@tried_again_when_missed
def test_several_prompts_in_one_request(server: LiveServer) -> None:
    """More prompts than seats: those that run and those that wait all end."""
    asked = {"prompt": [prompt(20, seed) for seed in range(2 * SEQS)], "max_tokens": 200}
    start = server.metrics()
    visitor = Visitor(server, [], **asked)
    with Brake(server) as brake, closing(visitor):
        brake.advance_until(lambda now: (now.running, now.waiting) == (SEQS, SEQS), "half queued")
    server.wait_until_idle()
    assert generated_since(start, server) < 200 * SEQS


def test_clients_that_leave_at_any_time(server: LiveServer) -> None:
    """A sweep over moments, without looking where the request is."""
    expected = server.tokens(prompt(20), 10)
    start = server.metrics()
    for pulses in range(0, 24, 2):
        visitor = Visitor(server, prompt(LONG, seed=200 + pulses), max_tokens=40, stream=True)
        with Brake(server) as brake, closing(visitor):
            for _ in range(pulses):
                brake.pulse()
    server.wait_until_idle()
    assert generated_since(start, server) < 12 * 40, "all requests ran to their end"
    assert server.tokens(prompt(20), 10) == expected
