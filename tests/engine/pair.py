"""One prefill and one decode engine, their daemons with a link between them that can be slowed, and a router."""

import json
import threading
import time
import urllib.request

import network
import vllm_proxy
from real_daemon import RealDaemon
from servers import Engines, Server

FAST = "10gbit"


class Daemon(RealDaemon):
    def __init__(self, side, net):
        self.side, self.net = side, net
        keys = {"metrics.listen_address": "127.0.0.1:0", "health.listen_address": "127.0.0.1:0"}
        if net is not None:
            self.launcher = net.launcher(side)
            keys["peer.listen_address"] = f"{network.ADDRESSES[side]}:0"
        super().__init__(**keys)

    def scrape(self):
        return network.in_host(self.net, self.side, super().scrape)


class Pair:
    def __init__(self):
        self.no_network = network.why_not()
        self.net = None if self.no_network else network.Network(FAST)
        self.prefill_daemon, self.decode_daemon = Daemon(0, self.net), Daemon(1, self.net)
        start = time.monotonic()
        self.prefill = self._server("kv_producer", self.prefill_daemon)
        self.decode = self._server("kv_consumer", self.decode_daemon)
        self.engines = Engines([self.prefill, self.decode])
        try:
            self.engines.wait_ready()
        except BaseException:
            self.engines.stop()
            raise
        print(f"\nboth engines were ready after {time.monotonic() - start:.0f} s")
        self.blocks = [server.stats()["free_blocks"] for server in (self.prefill, self.decode)]
        self.routers = {pull: self._router(pull) for pull in (False, True)}

    @staticmethod
    def _server(role, daemon):
        # Long: on a machine that others use too a prompt can take a minute.
        extra = {
            "daemon": daemon.worker, "peer_address": daemon.peer, "deadline_ms": 120_000, "refine": "RAW", "retain_seconds": 20.0,
        }  # fmt: skip
        return Server(role, extra, enable_prefix_caching=False)

    def _router(self, pull):
        addresses = [f"{server.host}:{server.port}" for server in (self.prefill, self.decode)]
        router = vllm_proxy.serve(vllm_proxy.Router(*addresses, self.decode_daemon.peer, pull), "127.0.0.1:0")
        threading.Thread(target=router.serve_forever, daemon=True).start()
        return router

    def routed(self, prompt, *, policy, pull=False, name="", refine="", **body):
        """A completion through the router; name: transfer id, for who looks at it later. refine: to which tier."""
        params = {"policy": {**policy, "refine": refine}, **({"transfer_id": name} if name else {})}
        host, port = self.routers[pull].server_address
        request = urllib.request.Request(
            f"http://{host}:{port}/v1/completions", json.dumps({"prompt": prompt, "kv_transfer_params": params, **body}).encode()
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=600) as answer:
            return json.load(answer)["choices"][0]

    def alone(self, prompt, **body):
        """The decode server computes it all."""
        return self.decode.complete(prompt=prompt, **body)["choices"][0]

    def report(self, name):
        """(the sender's, the receiver's)."""
        with self.prefill_daemon.client() as sender, self.decode_daemon.client() as receiver:
            return sender.get_transfer(name), receiver.get_transfer(name)

    def until_free(self, timeout_s=60):
        """Waits until both engines have all their blocks again; what they have otherwise."""
        end = time.monotonic() + timeout_s
        while True:
            free = [server.stats()["free_blocks"] for server in (self.prefill, self.decode)]
            if free == self.blocks or time.monotonic() > end:
                return free
            time.sleep(0.1)

    def slow(self, rate):
        if self.net is not None:
            self.net.slow(rate)

    def close(self):
        self.engines.stop()
        for router in self.routers.values():
            router.shutdown()
        for daemon in (self.prefill_daemon, self.decode_daemon):
            daemon.remove()
        if self.net is not None:
            self.net.close()
