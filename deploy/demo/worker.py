#!/usr/bin/env python3
"""A prefill or a decode worker without a model: shows, and tests, a deployment end to end.

    worker.py prefill     "computes" the KV of a prompt when asked over HTTP, and publishes it at its daemon
    worker.py decode      asks a prefill worker, fetches the KV through its own daemon, checks every word of it

A request is a number; its KV follows from the number alone, so that both sides know what must arrive. Even requests
travel as raw words and must be the same bit for bit; odd ones go under a budget of 0.3 and must be near.
Each request ends once: it is tried until it is there. Events are lines of JSON on stdout. SIGTERM ends the worker after
the request at hand; the exit status is 0 unless a word was wrong.

Environment: SPECTRUMKV_WORKER_SOCKET, the daemon's; DEMO_PEER, how other daemons reach that one ("host:port", this
host's address and port 7420, prefill);
DEMO_LISTEN, where to be asked ("0.0.0.0:8000", prefill); DEMO_PREFILL, whom to ask ("host:port", decode);
DEMO_REQUESTS, after how many to rest until SIGTERM (0: never, decode); DEMO_PAUSE_S, between requests (0.1, decode).
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import numpy as np

import spectrumkv as skv

TOKENS, BLOCK_TOKENS, LAYERS, HEADS, HEAD_DIM = 700, 16, 8, 4, 64
BLOCKS = -(-TOKENS // BLOCK_TOKENS)
MODEL = "demo"
DEADLINE_MS = 10000
MOST_ERROR = 0.2  # relative, of what travelled under a budget of 0.3
stopping = threading.Event()


def tell(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def kv_of(request: int) -> Any:
    """[layers, 2, tokens, heads, head_dim], float16."""
    shape = (LAYERS, 2, TOKENS, HEADS, HEAD_DIM)
    return np.random.default_rng(request).standard_normal(shape, dtype=np.float32).astype(np.float16)


def register(client: skv.Client, num_blocks: int) -> skv.SharedMemoryPool:
    group = skv.Group(
        layers=range(LAYERS), heads=HEADS, head_dim=HEAD_DIM, block_tokens=BLOCK_TOKENS, num_blocks=num_blocks
    )
    # The sidecar is started before this container, but a worker must not depend on that.
    while True:
        try:
            pool = client.shared_memory_pool([group], model=MODEL)
            break
        except skv.SpectrumKVError as error:
            if error.code != "UNAVAILABLE" or stopping.is_set():
                raise
            tell("waiting", error=str(error))
            stopping.wait(0.5)
    tell("registered", pool=pool.pool_id)
    threading.Thread(target=_watch_registrations, args=[pool], daemon=True).start()
    return pool


def _watch_registrations(pool: skv.SharedMemoryPool) -> None:
    """Tells when the client library has registered the pool again, as it does by itself after the daemon restarted."""
    seen = pool.registrations
    while not stopping.wait(0.05):
        if pool.registrations != seen:
            seen = pool.registrations
            tell("registered again", pool=pool.pool_id, registrations=seen)


class Prefill:
    """Answers POST /prefill {"request": n, "attempt": m} with the transfer to fetch."""

    def __init__(self, client: skv.Client, peer: str) -> None:
        self.client, self.peer = client, peer
        self.pool = register(client, 2 * BLOCKS)
        self._lock = threading.Lock()
        self._current = ""

    def compute(self, request: int, attempt: int) -> dict[str, Any]:
        transfer_id = f"demo-{request}-{attempt}"
        with self._lock:
            if self._current:  # its blocks are needed: nobody waits for an older attempt
                with contextlib.suppress(skv.SpectrumKVError):
                    self.client.cancel(self._current)
            blocks = [int(block) for block in np.random.default_rng(request).permutation(2 * BLOCKS)[:BLOCKS]]
            self.pool.write_tokens(kv_of(request), blocks)
            raw = request % 2 == 0
            policy = skv.policy(allocator="RAW", budget=1.1) if raw else skv.policy(budget=0.3)
            self.client.publish(transfer_id, pool=self.pool, token_count=TOKENS, blocks=blocks, policy=policy,
                                deadline_ms=DEADLINE_MS)  # fmt: skip
            self._current = transfer_id
        tell("published", request=request, transfer=transfer_id)
        return {"transfer": transfer_id, "peer": self.peer, "tokens": TOKENS}

    def serve(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        prefill = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))))
                try:
                    status, answer = 200, prefill.compute(int(asked["request"]), int(asked["attempt"]))
                except skv.SpectrumKVError as error:
                    status, answer = 503, {"error": str(error)}
                    tell("refused", request=asked.get("request"), error=str(error))
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tell("listening", address=address)
        stopping.wait()
        server.shutdown()


class Decode:
    def __init__(self, client: skv.Client, prefill: str) -> None:
        self.client, self.prefill = client, prefill
        self.pool = register(client, 3 * BLOCKS)
        self.wrong = 0

    def _ask(self, request: int, attempt: int) -> dict[str, Any]:
        host, port = self.prefill.rsplit(":", 1)
        connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE_MS / 1000)
        with contextlib.closing(connection):
            connection.request("POST", "/prefill", json.dumps({"request": request, "attempt": attempt}))
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        if response.status != 200:
            raise ConnectionError(answer.get("error", f"status {response.status}"))
        return answer

    def _fetch(self, request: int, attempt: int) -> None:
        asked = self._ask(request, attempt)
        blocks = [int(block) for block in np.random.default_rng(request + 1).permutation(3 * BLOCKS)[:BLOCKS]]
        start = time.perf_counter()
        self.client.fetch(asked["transfer"], peer=asked["peer"], pool=self.pool, token_count=TOKENS, blocks=blocks,
                          deadline_ms=DEADLINE_MS)  # fmt: skip
        report = self.client.wait(asked["transfer"], timeout_s=2 * DEADLINE_MS / 1000)
        seconds = time.perf_counter() - start
        landed, sent = self.pool.read_tokens(TOKENS, blocks), kv_of(request)
        if request % 2 == 0:
            right = bool((landed.view(np.uint16) == sent.view(np.uint16)).all())
        else:
            difference = landed.astype(np.float32) - sent.astype(np.float32)
            right = bool(np.sqrt((difference**2).mean() / (sent.astype(np.float32) ** 2).mean()) < MOST_ERROR)
        self.wrong += not right
        tell("committed", request=request, attempt=attempt, right=right, seconds=round(seconds, 4),
             kv_bytes=report.kv_bytes, wire_bytes=report.wire_bytes)  # fmt: skip

    def one(self, request: int) -> bool:
        """Tries until it is there; False where the worker is to end before."""
        attempt = 0
        while not stopping.is_set():
            try:
                self._fetch(request, attempt)
                return True
            except skv.TransferFailed as error:
                tell("failed", request=request, attempt=attempt, reason=error.report.reason, error=str(error))
            except (skv.SpectrumKVError, OSError, http.client.HTTPException) as error:
                tell("failed", request=request, attempt=attempt, reason=getattr(error, "reason", ""), error=str(error))
            attempt += 1
            stopping.wait(0.5)
        return False

    def run(self, requests: int, pause_s: float) -> None:
        done = 0
        while not stopping.is_set() and (requests == 0 or done < requests):
            done += self.one(done)
            stopping.wait(pause_s)
        tell("resting", done=done, wrong=self.wrong)
        stopping.wait()


def main(role: str) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    with skv.Client(os.environ["SPECTRUMKV_WORKER_SOCKET"]) as client:
        if role == "prefill":
            peer = os.environ.get("DEMO_PEER") or f"{socket.gethostbyname(socket.gethostname())}:7420"
            prefill = Prefill(client, peer)
            with prefill.pool:
                prefill.serve(os.environ.get("DEMO_LISTEN", "0.0.0.0:8000"))
            status = 0
        else:
            decode = Decode(client, os.environ["DEMO_PREFILL"])
            with decode.pool:
                decode.run(int(os.environ.get("DEMO_REQUESTS", "0")), float(os.environ.get("DEMO_PAUSE_S", "0.1")))
            status = 1 if decode.wrong else 0
    tell("ended", status=status)
    return status


if __name__ == "__main__":
    if sys.argv[1:] not in (["prefill"], ["decode"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
