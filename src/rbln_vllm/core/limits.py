# SPDX-License-Identifier: Apache-2.0
"""How many tokens the KV pool can hold for one request, and what to say when that is too few.

Block 0 is the padding block: reserved for the life of the engine, never granted.
"""

RESERVED_BLOCKS = 1


def max_request_tokens(num_blocks: int, block_size: int) -> int:
    """Returns the tokens one request alone can keep in a pool of ``num_blocks`` blocks.

    Args:
        num_blocks: all blocks of the pool, the reserved one included.
        block_size: tokens per block.

    Raises:
        ValueError: there is no block, or blocks hold nothing.
    """
    if num_blocks < 1 or block_size < 1:
        raise ValueError(
            f"a KV pool needs at least 1 block of 1 token, got {num_blocks} of {block_size}"
        )
    return (num_blocks - RESERVED_BLOCKS) * block_size


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Returns the pool size, the reserved block included, that holds ``num_tokens`` tokens."""
    return -(-num_tokens // block_size) + RESERVED_BLOCKS


def check_fits(max_model_len: int, num_blocks: int, block_size: int) -> None:
    """Refuses a pool that cannot hold one sequence of ``max_model_len`` tokens.

    Raises:
        ValueError: with the largest length that fits and the settings to change.
    """
    fits = max_request_tokens(num_blocks, block_size)
    if max_model_len <= fits:
        return
    needed = blocks_for(max_model_len, block_size)
    raise ValueError(
        f"max_model_len {max_model_len} does not fit the KV pool: {num_blocks} blocks of "
        f"{block_size} tokens, one of them reserved for padding, hold {fits} tokens. "
        f"The largest --max-model-len that fits is {fits}. Lower it, or raise "
        f"--gpu-memory-utilization or VLLM_CPU_KVCACHE_SPACE until the pool has {needed} blocks."
    )


def prompt_refusal(num_tokens: int, limit: int) -> str | None:
    """Returns why a prompt of ``num_tokens`` tokens can never run, or None if it can."""
    if num_tokens <= limit:
        return None
    return (
        f"the prompt has {num_tokens} tokens, but the KV pool holds at most {limit} for one "
        "request: shorten the prompt, or restart the server with a larger KV pool"
    )
