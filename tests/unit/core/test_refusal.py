# SPDX-License-Identifier: Apache-2.0
"""Requests that cannot run end with an error of their own; nobody else notices."""

import pickle

import pytest

from rbln_vllm.core.refusal import RBLNModelRunnerOutput
from tests.unit.core.harness import Driver, SchedulerFactory, prompt_of


@pytest.mark.parametrize(
    ("length", "tokens", "reason"), [(47, 2, "length"), (48, 1, "length"), (49, 0, "error")]
)
def test_d03_prompts_around_the_size_of_the_pool(
    build: SchedulerFactory, length: int, tokens: int, reason: str
) -> None:
    """12 grantable blocks hold 48 tokens; max_model_len promises more than start-up allows."""
    driver = Driver(build(blocks=13, max_len=64))
    driver.add("long", prompt_of(length, 1), max_tokens=9)
    driver.add("next", prompt_of(4, 2), max_tokens=3)
    driver.run(limit=20).check_text("next")
    assert driver.finished["long"].reason == reason
    assert len(driver.tokens["long"]) == tokens


def test_d03_the_refusal_states_the_limit(build: SchedulerFactory) -> None:
    driver = Driver(build(blocks=13, max_len=64))
    driver.add("long", prompt_of(49))
    driver.run()
    assert "49 tokens" in str(driver.finished["long"].stop_reason)
    assert "48" in str(driver.finished["long"].stop_reason)


def test_d03_a_request_that_grows_to_the_end_of_the_pool_ends(build: SchedulerFactory) -> None:
    """Beside others it is preempted and must fit again; alone it stops at the last slot."""
    driver = Driver(build(blocks=7, max_len=64, seqs=3))
    for i in range(3):
        driver.add(f"r{i}", prompt_of(9, i), max_tokens=50)
    driver.run().check_text()
    assert [len(driver.tokens[f"r{i}"]) for i in range(3)] == [16, 16, 16]


def test_a_refused_decode_row_ends_alone(build: SchedulerFactory) -> None:
    driver = Driver(build())
    for i, name in enumerate("abc"):
        driver.add(name, prompt_of(5, i), max_tokens=6)
    for _ in range(4):
        driver.step()
    driver.runner.refuse = {"b": "program decode B=4 was not compiled"}
    driver.run().check_text("a", "c")
    assert driver.finished["b"].reason == "error"
    assert driver.finished["b"].stop_reason == "program decode B=4 was not compiled"
    assert len(driver.tokens["b"]) == 2


def test_a_refused_prefill_chunk_gives_its_blocks_back(build: SchedulerFactory) -> None:
    driver = Driver(build(max_prefill_run=1))
    driver.add("a", prompt_of(5), max_tokens=6)
    driver.step()
    driver.add("b", prompt_of(30, 1))
    driver.step()
    driver.runner.refuse = {"b": "not compiled"}
    driver.run().check_text("a")
    assert driver.finished["b"].reason == "error"
    assert driver.tokens["b"] == []


def test_refusing_a_request_that_has_left_is_harmless(build: SchedulerFactory) -> None:
    driver = Driver(build())
    driver.add("a", prompt_of(5), max_tokens=3)
    driver.add("b", prompt_of(5, 1), max_tokens=3)
    driver.runner.refuse = {"b": "not compiled"}
    driver.step()
    driver.step(abort_in_flight=["b"])
    driver.run().check_text("a")
    assert "b" not in driver.finished


def test_the_output_survives_the_way_from_worker_to_engine() -> None:
    output = RBLNModelRunnerOutput(["a"], {"a": 0}, [[]], refused={"a": "no"})
    assert pickle.loads(pickle.dumps(output)).refused == {"a": "no"}
