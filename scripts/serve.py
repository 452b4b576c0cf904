# SPDX-License-Identifier: Apache-2.0
"""Serve a model with `rbln-vllm serve` and, once it is ready, print a `curl` line that works.

usage: serve.py MODEL [--port 8000] [any option of `vllm serve`]

The server writes to this terminal. An interrupt or a termination is passed on to it, a second one
ends it at once; the exit code is the server's.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
from types import FrameType

from server_process import (
    LOCALHOST,
    end_group,
    fetch,
    free_port,
    is_healthy,
    port_problem,
    serve_command,
)

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EVERY_ADDRESS = ("0.0.0.0", "::", "")
QUESTION = "What is the capital of France?"
QUESTIONS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
    },
    "/v1/embeddings": {"input": QUESTION},
    "/classify": {"input": QUESTION},
}
"""What a server is asked, by the first of its routes that is here."""


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host")
    parser.add_argument("--api-key")
    options, extra = parser.parse_known_args()
    problem = port_problem(options.port)
    if problem is not None:
        other = free_port()
        print(f"error: {problem}. Choose another one: make serve PORT={other}", file=sys.stderr)
        return 1
    command = serve_command([options.model, "--port", str(options.port), *extra])
    command += [f"--host={options.host}"] if options.host else []
    command += [f"--api-key={options.api_key}"] if options.api_key else []
    host = LOCALHOST if options.host in (None, *EVERY_ADDRESS) else options.host
    return supervise(command, f"http://{host}:{options.port}", options.api_key)


def supervise(command: list[str], url: str, api_key: str | None) -> int:
    """Run the server to its end; returns its exit code as a shell would give it."""
    child = subprocess.Popen(command, text=True, start_new_session=True)
    stops = 0

    def forward(signum: int, frame: FrameType | None) -> None:
        nonlocal stops
        stops += 1
        child.send_signal(signum if stops == 1 else signal.SIGKILL)

    for signum in FORWARDED:
        signal.signal(signum, forward)
    try:
        code = wait_and_announce(child, url, api_key)
    finally:
        end_group(child)
    return code if code >= 0 else 128 - code


def wait_and_announce(child: subprocess.Popen[str], url: str, api_key: str | None) -> int:
    """Wait for the child's end; on the way, when the server becomes ready, say how to ask it."""
    announced = False
    while True:
        try:
            return child.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            if not announced and is_healthy(url):
                announced = True
                print(f"\nready at {url}{how_to_ask(url, api_key)}\n", flush=True)


def how_to_ask(url: str, api_key: str | None) -> str:
    """A sentence with a shell command that asks a question, or nothing when models are hidden."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        models = json.loads(fetch(f"{url}/v1/models", headers))
        routes = json.loads(fetch(f"{url}/openapi.json", headers))["paths"]
    except OSError:
        return ""
    asked = next((path for path in QUESTIONS if path in routes), None)
    if asked is None:
        return ""
    return f". Ask it something:\n\n{curl_line(url, asked, models['data'][0]['id'], headers)}"


def curl_line(url: str, path: str, model: str, headers: dict[str, str]) -> str:
    """A command for a shell that asks the served model one question."""
    words = ["curl", f"{url}{path}"]
    for name, value in {"Content-Type": "application/json", **headers}.items():
        words += ["-H", f"{name}: {value}"]
    return shlex.join([*words, "-d", json.dumps({"model": model, **QUESTIONS[path]})])


if __name__ == "__main__":
    sys.exit(main())
