# SPDX-License-Identifier: Apache-2.0
"""A server of the standard library in place of `rbln-vllm serve`, for tests of what starts it.

Answers /health and /v1/models, keeps a child process like an engine does, whose id it writes to
FAKE_ENGINE_PID, and ends with 7 when it is told to stop.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

EXIT_CODE = 7
MODEL = "it's a model"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        routes: dict[str, dict[str, object]] = {
            os.environ.get("FAKE_ROUTE", "/v1/chat/completions"): {}
        }
        body = json.dumps({"data": [{"id": MODEL}], "paths": routes}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def stop(signum: int, frame: FrameType | None) -> None:
    print(f"told to stop by {signal.Signals(signum).name}", flush=True)
    os._exit(EXIT_CODE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--fail", action="store_true")
    options, extra = parser.parse_known_args()
    print(f"arguments {extra}", flush=True)
    if options.fail:
        sys.exit("could not load the model")
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["FAKE_ENGINE_PID"]).write_text(str(engine.pid))
    http.server.HTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
