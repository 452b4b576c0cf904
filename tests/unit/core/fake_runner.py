# SPDX-License-Identifier: Apache-2.0
"""A runner that has a real KV memory and no model.

It sees ``SchedulerOutput`` objects and nothing else. It keeps its own block tables, writes every
computed token into a simulated KV memory through them, reads the whole context back before it
"samples", and derives the sampled token from what it read. So a lost block grant, a block with two
owners or a doubled token changes the text.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from rbln_vllm.core.multi_step import UNKNOWN_TOKEN
from rbln_vllm.core.refusal import RBLNModelRunnerOutput
from rbln_vllm.core.step import classify

VOCAB = 97
NULL_BLOCK = 0


def sample(context: Sequence[int]) -> int:
    """The fake model: the next token is a hash of the whole context."""
    return zlib.crc32(bytes(context)) % VOCAB


@dataclass
class Row:
    """What the runner remembers of one request."""

    tokens: list[int]
    prompt_len: int
    table: list[int]


class FakeRunner:
    """Executes steps on a simulated KV memory, told by ``SchedulerOutput`` alone."""

    def __init__(self, chunk: int, block: int) -> None:
        self.chunk, self.block = chunk, block
        self.rows: dict[str, Row] = {}
        self.kv: dict[tuple[int, int], int] = {}
        self.refuse: dict[str, str] = {}
        # Ids of the blocks the last step was granted, without those it shares.
        self.granted: list[int] = []

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._update(output)
        self._copy(output)
        plan = classify(output, self.chunk)
        refused = {r: self.refuse[r] for r in plan.request_ids if r in self.refuse}
        run = self._take_steps if self._is_turn(output) else self._run
        sampled = [
            [] if req_id in refused else run(req_id, self._start(output, req_id), n)
            for req_id, n in zip(plan.request_ids, plan.tokens, strict=True)
        ]
        ids = list(plan.request_ids)
        index = {req_id: i for i, req_id in enumerate(ids)}
        if not refused:
            return ModelRunnerOutput(ids, index, sampled)
        return RBLNModelRunnerOutput(ids, index, sampled, refused=refused)

    def _is_turn(self, output: SchedulerOutput) -> bool:
        """Whether this is several decode steps: the same number for every row."""
        drafts = list(output.scheduled_spec_decode_tokens.values())
        if not drafts or UNKNOWN_TOKEN not in drafts[0]:
            return False
        assert drafts == [drafts[0]] * len(output.num_scheduled_tokens)
        assert set(drafts[0]) == {UNKNOWN_TOKEN}
        return True

    def _take_steps(self, req_id: str, start: int, count: int) -> list[int]:
        return [token for step in range(count) for token in self._run(req_id, start + step, 1)]

    def _update(self, output: SchedulerOutput) -> None:
        self.granted = []
        for req_id in output.finished_req_ids:
            self.rows.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            prompt = list(new.prompt_token_ids)
            self.rows[new.req_id] = Row(prompt, len(prompt), list(new.block_ids[0]))
            self._grant(new.block_ids[0][new.num_computed_tokens // self.block :])
        cached = output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            row, blocks = self.rows[req_id], cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                assert blocks is not None
                row.table = list(blocks[0])
                self._grant(blocks[0][cached.num_computed_tokens[i] // self.block :])
                row.tokens = list(cached.all_token_ids.get(req_id, row.tokens))
            elif blocks is not None:
                row.table += blocks[0]
                self._grant(blocks[0])
            known = row.prompt_len + cached.num_output_tokens[i]
            assert len(row.tokens) == known or req_id in self.refuse

    def _grant(self, block_ids: Sequence[int]) -> None:
        """Nothing of what a granted block held may be read again."""
        self.granted += block_ids
        for block_id in block_ids:
            for offset in range(self.block):
                self.kv.pop((block_id, offset), None)

    def _copy(self, output: SchedulerOutput) -> None:
        for source, destination, length in output.kv_cache_block_copies or ():
            assert NULL_BLOCK not in (source, destination)
            assert 0 < length < self.block
            for offset in range(length):
                self.kv[destination, offset] = self.kv[source, offset]

    def _start(self, output: SchedulerOutput, req_id: str) -> int:
        for new in output.scheduled_new_reqs:
            if new.req_id == req_id:
                return int(new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        return int(cached.num_computed_tokens[cached.req_ids.index(req_id)])

    def _run(self, req_id: str, start: int, count: int) -> list[int]:
        row = self.rows[req_id]
        for position in range(start, start + count):
            self.kv[self._slot(row, position)] = row.tokens[position]
        slots = [self._slot(row, position) for position in range(start + count)]
        context = row.tokens[: start + count]
        assert [self.kv.get(slot) for slot in slots] == context, f"KV of {req_id} is not its own"
        if start + count < len(row.tokens):
            return []
        row.tokens.append(sample(context))
        return [row.tokens[-1]]

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        block_id = row.table[position // self.block]
        assert block_id != NULL_BLOCK, "the padding block was granted"
        return block_id, position % self.block
