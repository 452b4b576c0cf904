# SPDX-License-Identifier: Apache-2.0
"""The scheduler of encoders: whole prompts, as many in a step as its programs hold.

There are no turns, no chunks and no KV: upstream's order and limits (``max_num_seqs``,
``max_num_scheduled_tokens``) are all there is to decide. Refusals are the base class's.
"""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from rbln_vllm.core.scheduler import RBLNScheduler
from rbln_vllm.core.step import whole_prompts


class EncoderScheduler(RBLNScheduler):
    """Any number of whole prompts per step."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedules waiting requests, in their order, until a step is full.

        Raises:
            StepRuleError: upstream scheduled a part of a prompt.
        """
        output: SchedulerOutput = Scheduler.schedule(self, throttle_prefills)
        self.last_step = whole_prompts(output)
        return output


class AsyncEncoderScheduler(EncoderScheduler, AsyncScheduler):
    """The same over upstream's scheduler that runs one step ahead of the output."""
