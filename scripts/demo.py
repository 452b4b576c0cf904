# SPDX-License-Identifier: Apache-2.0
"""Serve a model, ask it one question through the `openai` client, print the answer, stop.

usage: demo.py MODEL [--port N] [any option of `vllm serve`]

Exits 0 when an answer came, 1 otherwise with the end of the server's log.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import openai

from server_process import ServerError, ServerProcess, port_problem

QUESTION = "What is the capital of France?"
PROGRESS = re.compile(r"rbln|compil|loading|download", re.IGNORECASE)
LOG_FILE = Path(".cache") / "demo-server.log"


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, help="default: a free one")
    options, extra = parser.parse_known_args()
    problem = port_problem(options.port) if options.port else None
    if problem is not None:
        print(f"error: {problem}; leave PORT out for a free one", file=sys.stderr)
        return 1
    server = ServerProcess(
        [options.model, *extra],
        log_file=LOG_FILE,
        port=options.port,
        deadline=900,
        on_line=show_progress,
    )
    started = time.monotonic()
    print(f"starting the server (its log: {LOG_FILE})", flush=True)
    try:
        with server:
            print(f"ready after {time.monotonic() - started:.0f} s\n", flush=True)
            ask(server.url)
    except (ServerError, openai.OpenAIError) as error:
        tail = "" if isinstance(error, ServerError) else f"\n{server.log_tail()}"
        print(f"error: {error}{tail}", file=sys.stderr)
        return 1
    print("the server has stopped")
    return 0


def show_progress(line: str) -> None:
    """Pass on lines about this plugin, loading and compiling; the rest is in the log file."""
    if PROGRESS.search(line):
        print(f"  | {line}", flush=True)


def ask(url: str) -> None:
    """Ask one question and print the answer as it arrives. Raises `openai.OpenAIError`."""
    direct = openai.DefaultHttpxClient(trust_env=False)  # this machine, so through no proxy
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", http_client=direct)
    model = client.models.list().data[0].id
    print(f"> {QUESTION}", flush=True)
    started = time.monotonic()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    answer, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        text = chunk.choices[0].delta.content if chunk.choices else None
        answer += text or ""
        print(text or "", end="", flush=True)
    if not answer or usage is None:
        raise openai.OpenAIError("the server answered with no text or no usage")
    seconds = time.monotonic() - started
    print(f"\n\n{usage.completion_tokens} tokens in {seconds:.2f} s")


if __name__ == "__main__":
    sys.exit(main())
