"""Two daemons with certificates and what goes on between them: transfers of all kinds, and each thing a panel of errors
counts. An engine's own metric beside them."""

import http.server
import pathlib
import shutil
import socket
import threading
import time

import numpy as np
from authority import Ca
from moves import fill, make_side, move, random_words, scattered, unique
from real_daemon import RealDaemon

import spectrumkv as skv
from spectrumkv.v1 import worker_service_pb2

TOKENS, LAYERS = 600, 6
# In turn, so that the tier mix changes over time.
POLICIES = [
    dict(allocator="GREEDY", budget=0.5, importance="POSITION"), dict(budget=0.3), dict(budget="auto", target_seconds=0.02),
    dict(allocator="TWO_TIER", budget=0.6), dict(budget=0.22), dict(allocator="UNIFORM", uniform_tier="P8", budget=0.6, sinks=4,
                                                                   tiers=["RAW", "P8", "P4"]),
]  # fmt: skip
EDGES = [.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560]


class Engine:
    """Serves vllm:time_to_first_token_seconds as vLLM's API server does; it is not vLLM, it plays that one metric."""

    def __init__(self):
        self.seen, self.lock = [], threading.Lock()
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = engine.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def observe(self, seconds):
        with self.lock:
            self.seen.append(seconds)

    def text(self):
        name, labels = "vllm:time_to_first_token_seconds", 'engine="0",model_name="m"'
        with self.lock:
            seen = list(self.seen)
        lines = [f"# HELP {name} Histogram of time to first token in seconds.", f"# TYPE {name} histogram"]
        lines += [f'{name}_bucket{{{labels},le="{edge}"}} {sum(s <= edge for s in seen)}' for edge in EDGES]
        lines += [f'{name}_bucket{{{labels},le="+Inf"}} {len(seen)}', f"{name}_sum{{{labels}}} {sum(seen)}",
                  f"{name}_count{{{labels}}} {len(seen)}"]  # fmt: skip
        return "\n".join(lines) + "\n"

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class Deployment:
    """Two daemons and the traffic between them; close() ends both."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.ca = Ca(self.folder)
        keys = dict(peer__tls__reload_interval_ms=300, metrics__reconstruction_sample_chunks=4, quota__pools_per_user=8,
                    memory__send_slots=16, memory__receive_slots=16)  # fmt: skip
        self.here = RealDaemon(**self.ca.issue("prefill", 60), **keys)
        self.there = RealDaemon(**self.ca.issue("decode", 20), **keys)
        self.source, self.target = self.here.client(), self.there.client()
        self.engine = Engine()
        rng = np.random.default_rng(5)
        group = skv.Group(layers=range(LAYERS), heads=8, head_dim=64, block_tokens=16, num_blocks=48)
        self.a = make_side(self.source, self.here, [group], {0: scattered(rng, group, TOKENS)})
        self.b = make_side(self.target, self.there, [group], {0: scattered(rng, group, TOKENS)})
        self.kv = random_words(rng, (LAYERS, 2, TOKENS, 8, 64), "float16")
        self.kv[0, 0, 7, 0, 0] = 0x7E00  # a NaN
        fill(self.a, [self.kv])
        self.reports = []

    def daemons(self):
        return {"prefill": self.here, "decode": self.there}

    def transfers(self, seconds):
        """One after another until the time is over; every fifth layer by layer. Reports first tokens, to the engine too."""
        end, count = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            name, began = unique("live"), time.monotonic()
            policy = skv.policy(**POLICIES[count * len(POLICIES) // 60 % len(POLICIES)])
            if count % 5 == 4:
                self._layerwise(name, policy)
            else:
                move(name, self.source, self.target, self.here, self.there, self.a, self.b, TOKENS, policy=policy)
            self.reports.append(self.source.get_transfer(name))
            first_token = time.monotonic() - began
            self.target.report_first_token(name, first_token)
            self.engine.observe(first_token)
            count += 1
            time.sleep(0.05)  # leaves the machine to others

    def _layerwise(self, name, policy):
        self.target.expect(name, pool=self.b.pool, token_count=TOKENS, blocks=self.b.blocks)
        self.source.send(name, peer=self.there.peer, pool=self.a.pool, token_count=TOKENS, blocks=self.a.blocks, policy=policy,
                         layerwise=True)  # fmt: skip
        for layers in range(1, LAYERS + 1):
            self.source.advance(name, layers=layers, tokens=TOKENS)
        self.target.wait(name, timeout_s=60)
        self.source.wait(name, timeout_s=60)

    def troubles(self):
        """One of each: a half that never comes, a worker that dies, quotas, strangers, certificates."""
        name = unique("alone")
        self.target.expect(name, pool=self.b.pool, token_count=TOKENS, blocks=self.b.blocks, deadline_ms=50)
        try:
            self.target.wait(name, timeout_s=20)
        except skv.TransferFailed:
            pass
        self.target.expect(name + "c", pool=self.b.pool, token_count=TOKENS, blocks=self.b.blocks)
        self.target.cancel(name + "c")
        schema = skv.pools.schema_pb2.PoolSchema(model="m", groups=[skv.Group(
            layers=[0], heads=2, head_dim=16, block_tokens=4, num_blocks=4).to_proto(0, 0)])  # fmt: skip
        schema.segments.add().daemon_owned.size_bytes = 1 << 14
        for index in range(9):  # one more than a user may have
            request = worker_service_pb2.RegisterPoolRequest(request_id=f"dies-{index}", schema=schema, lease_ttl_ms=1000)
            try:
                self.source.worker.RegisterPool(request)
            except Exception:  # noqa: BLE001, S110 - the quota
                pass
        self.stranger()
        self.certificates()

    def stranger(self):
        """Speaks no TLS at the peer port."""
        host, port = self.there.peer.rsplit(":", 1)
        with socket.create_connection((host, int(port)), 5) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            stranger.settimeout(5)
            stranger.recv(100)

    def certificates(self):
        """A rotation that is seen half way: a key without its certificate, then both."""
        self.ca.issue("next", 90)
        shutil.copy(self.folder / "next.key", self.folder / "prefill.key")
        self._reloads("failed")
        shutil.copy(self.folder / "next.pem", self.folder / "prefill.pem")
        self._reloads("ok")

    def _reloads(self, result):
        end = time.monotonic() + 20
        while self.here.metrics()[f'spectrumkv_certificate_reloads_total{{result="{result}"}}'] == 0:
            assert time.monotonic() < end, f"no certificate reload that is {result}"
            time.sleep(0.1)

    def close(self):
        for client in (self.source, self.target):
            client.close()
        self.engine.close()
        for daemon in (self.here, self.there):
            daemon.remove()
