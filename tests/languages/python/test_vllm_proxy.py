"""The router of the examples, before two servers that write down what they are asked."""

import contextlib
import http.client
import json
import pathlib
import queue
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "client/examples/python"))
import vllm_proxy  # noqa: E402


class Asked:
    """A server: `bodies` it was asked with, and its answer, which it gives in pieces."""

    def __init__(self, pieces, status=200):
        self.bodies, self.held, self.cut = queue.Queue(), threading.Event(), threading.Event()
        self.held.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_POST(self):
                outer.bodies.put((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                if not outer.held.is_set() and not self.connection.recv(1):  # until the router hangs up
                    return outer.cut.set()
                self.send_response(status)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for piece in pieces:
                    self.wfile.write(piece)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = "127.0.0.1:%d" % self.server.server_address[1]


@contextlib.contextmanager
def routed(prefill, decode, pull=False):
    server = vllm_proxy.serve(vllm_proxy.Router(prefill, decode.address, "peer:7421", pull, timeout_s=20), "127.0.0.1:0")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    connection = http.client.HTTPConnection(*server.server_address, timeout=20)
    try:
        yield connection
    finally:
        connection.close()
        server.shutdown()
        server.server_close()


def ask(connection, **body):
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "p", "max_tokens": 9, **body}))
    answer = connection.getresponse()
    return answer.status, answer.read()


@pytest.fixture
def decode():
    return Asked([b"data: one\n", b"data: two\n"])


def test_push_asks_both_with_one_name(decode):
    prefill = Asked([b"{}"])
    with routed(prefill.address, decode) as connection:
        assert ask(connection, stream=True, stream_options={}, max_completion_tokens=9) == (200, b"data: one\ndata: two\n")
    path, to_decode = decode.bodies.get(timeout=20)
    _, to_prefill = prefill.bodies.get(timeout=20)
    ours, theirs = to_decode.pop("kv_transfer_params"), to_prefill.pop("kv_transfer_params")
    assert path == "/v1/completions" and to_decode["max_tokens"] == 9 and to_decode["stream"]
    assert to_prefill == {"prompt": "p", "max_tokens": 1, "max_completion_tokens": 1, "stream": False}
    assert ours.pop("do_remote_prefill") and theirs.pop("do_remote_decode") and ours == theirs
    assert ours["decode_peer"] == "peer:7421" and len(bytes.fromhex(ours["transfer_token"])) == 16


def test_names_are_never_used_twice_and_a_policy_is_passed_on(decode):
    prefill = Asked([b"{}"])
    with routed(prefill.address, decode) as connection:
        for _ in range(2):
            ask(connection, kv_transfer_params={"policy": {"budget": 0.3}})
    told = [decode.bodies.get(timeout=20)[1]["kv_transfer_params"] for _ in range(2)]
    assert told[0]["transfer_id"] != told[1]["transfer_id"] and told[0]["policy"] == {"budget": 0.3}


@pytest.mark.parametrize("pull", [False, True])
@pytest.mark.parametrize("prefill", ["127.0.0.1:1", 500])
def test_a_prefill_that_fails_costs_no_answer(decode, pull, prefill):
    address = prefill if isinstance(prefill, str) else Asked([b"no"], status=prefill).address
    with routed(address, decode, pull) as connection:
        assert ask(connection)[0] == 200
    assert ("kv_transfer_params" in decode.bodies.get(timeout=20)[1]) is not pull


def test_pull_passes_on_what_the_prefill_tells(decode):
    told = {"transfer_id": "t", "prefill_peer": "p:1", "do_remote_prefill": True}
    prefill = Asked([json.dumps({"kv_transfer_params": told}).encode()])
    with routed(prefill.address, decode, pull=True) as connection:
        assert ask(connection)[0] == 200
    assert decode.bodies.get(timeout=20)[1]["kv_transfer_params"] == told
    assert "decode_peer" not in prefill.bodies.get(timeout=20)[1]["kv_transfer_params"]


def test_a_client_that_goes_ends_the_decode(decode):
    decode.held.clear()
    with routed("127.0.0.1:1", decode) as connection:
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "p"}))
        decode.bodies.get(timeout=20)
        connection.close()
        assert decode.cut.wait(20)


def test_a_decode_that_is_not_there(decode):
    decode.address = "127.0.0.1:1"
    with routed("127.0.0.1:1", decode) as connection:
        assert ask(connection)[0] == 502
