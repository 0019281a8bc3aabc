"""A router for one prefill and one decode server of vLLM with spectrumkv.vllm: LISTEN PREFILL DECODE DECODE_PEER [--pull].

All are host:port; DECODE_PEER is the daemon beside the decode server. Both servers are asked at once, and the KV is pushed while it is computed.
With --pull the prefill comes first, and its answer says where the decode fetches the KV (kv_transfer_params).
"""

import contextlib
import http.client
import json
import secrets
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_PIECE = 1 << 16


class Router:
    def __init__(self, prefill, decode, decode_peer, pull=False, timeout_s=600.0):
        self.prefill, self.decode, self.decode_peer, self.pull, self.timeout_s = prefill, decode, decode_peer, pull, timeout_s

    def ask(self, server, path, body):
        """An open connection and its answer."""
        connection = http.client.HTTPConnection(server, timeout=self.timeout_s)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def route(self, path, body):
        """The decode's connection and answer. Where the prefill fails, the decode computes the prompt itself."""
        asked = body.pop("kv_transfer_params", None) or {}
        both = {"transfer_id": f"proxy-{secrets.token_hex(16)}", "transfer_token": secrets.token_hex(16), **asked}
        if self.pull:
            told = self._prefill(path, body, both)
            return self.ask(self.decode, path, {**body, "kv_transfer_params": told} if told else body)
        both |= {"decode_peer": self.decode_peer, "arrived_s": time.time()}
        threading.Thread(target=self._prefill, args=(path, body, both), daemon=True).start()
        return self.ask(self.decode, path, {**body, "kv_transfer_params": {**both, "do_remote_prefill": True}})

    def _prefill(self, path, body, params):
        """What the prefill's answer tells the decode; None where it failed."""
        one = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": {**params, "do_remote_decode": True}}
        if "max_completion_tokens" in body:
            one["max_completion_tokens"] = 1
        one.pop("stream_options", None)
        try:
            connection, answer = self.ask(self.prefill, path, one)
            with contextlib.closing(connection):
                return json.loads(answer.read()).get("kv_transfer_params") if answer.status == 200 else None
        except (OSError, ValueError, http.client.HTTPException) as error:
            print(f"prefill: {error!r}", file=sys.stderr)
            return None


def serve(router, listen):
    """The server, not yet running."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            connection, answer = router.route(self.path, body)
            with contextlib.closing(connection):  # also when the client has gone: vLLM then aborts the request
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.getheader("Content-Type", "application/json"))
                self.end_headers()
                while piece := answer.read1(_PIECE):
                    self.wfile.write(piece)

    host, _, port = listen.rpartition(":")
    return ThreadingHTTPServer((host, int(port)), Handler)


if __name__ == "__main__":
    listen, prefill, decode, decode_peer, *rest = sys.argv[1:]
    serve(Router(prefill, decode, decode_peer, pull=rest == ["--pull"]), listen).serve_forever()
