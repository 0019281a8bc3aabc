"""A router for one prefill and one decode server of vLLM with spectrumkv.vllm: LISTEN PREFILL DECODE DECODE_PEER [--pull].

All are host:port; DECODE_PEER is the daemon beside the decode server. Both servers are asked at once, and the KV is pushed while it is computed.
With --pull the prefill comes first, and its answer says where the decode fetches the KV (kv_transfer_params).
"""

import contextlib
import http.client
import json
import secrets
import select
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_PIECE = 1 << 16


class Router:
    def __init__(self, prefill, decode, decode_peer, pull=False, timeout_s=600.0):
        self.prefill, self.decode, self.decode_peer, self.pull, self.timeout_s = prefill, decode, decode_peer, pull, timeout_s

    def ask(self, server, path, body):
        """A connection whose answer is to come."""
        connection = http.client.HTTPConnection(server, timeout=self.timeout_s)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            return connection
        except BaseException:
            connection.close()
            raise

    def route(self, path, body):
        """The decode's connection. Where the prefill fails, the decode computes the prompt itself."""
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
            with contextlib.closing(self.ask(self.prefill, path, one)) as connection:
                answer = connection.getresponse()
                told = answer.read()
            if answer.status == 200:
                return json.loads(told).get("kv_transfer_params")
            print(f"prefill: {answer.status} {told[:200]!r}", file=sys.stderr)
        except (OSError, ValueError, http.client.HTTPException) as error:
            print(f"prefill: {error!r}", file=sys.stderr)
        return None


def has_gone(client, server):
    """Waits until `server` has something to say, or `client` is gone: whether it is."""
    while True:
        ready, _, _ = select.select([client, server], [], [])
        if server in ready:
            return False
        if not client.recv(1, socket.MSG_PEEK):
            return True
        time.sleep(0.1)  # a client that sends more than its request


def serve(router, listen):
    """The server, not yet running."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            try:
                connection = router.route(self.path, body)
            except OSError as error:
                return self.send_error(502, f"decode: {error}")
            with contextlib.closing(connection):  # before its answer has ended: vLLM then aborts the request
                if has_gone(self.connection, connection.sock):
                    return None
                try:
                    answer = connection.getresponse()
                except (OSError, http.client.HTTPException) as error:
                    return self.send_error(502, f"decode: {error}")
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
