"""What the scripts beside this file share: scattered pages, the two sides' private connection, and the line protocol.

A peer system runs as two processes, a target and an initiator, that spectrumkv_bench starts and drives:

    target     prints {"address": "HOST:PORT"} and serves one initiator
    initiator  --connect HOST:PORT; prints {"ready": true}; then for each line on stdin one JSON line:
               go     moves all pages once, {"seconds": S}
               check  {"verified": true} if every page lies where it belongs and nothing else was written
"""

import argparse
import fcntl
import json
import socket
import struct
import sys

import numpy as np

SIOCGIFADDR = 0x8915


class Pages:
    """`count` pages at scattered places of a pool that has a quarter more; the same bytes and order for all systems."""

    def __init__(self, args, source):
        self.count, self.bytes = args.pages, args.page_bytes
        places = self.count + (self.count + 3) // 4
        order = np.random.default_rng(7 if source else 8).permutation(places)
        self.places = order[: self.count]
        self.spare = order[self.count :]
        self.pool = np.zeros(places * self.bytes, dtype=np.uint8)
        self.pool.view(np.uint32)[:] = 1  # touched, so that no page fault is timed
        if source:
            words = self.pool.view(np.uint32).reshape(places, -1)
            for index, place in enumerate(self.places):
                words[place] = self._expected(index)

    def addresses(self):
        base = self.pool.ctypes.data
        return [base + int(place) * self.bytes for place in self.places]

    def verified(self):
        words = self.pool.view(np.uint32).reshape(-1, self.bytes // 4)
        moved = all((words[place] == self._expected(index)).all() for index, place in enumerate(self.places))
        return bool(moved and (words[self.spare] == 1).all())

    def _expected(self, index):
        return np.arange(self.bytes // 4, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(index)


def send(conn, data):
    conn.sendall(struct.pack("<I", len(data)) + data)


def receive(conn):
    def exact(size):
        out = b""
        while len(out) < size:
            part = conn.recv(size - len(out))
            if not part:
                raise SystemExit("the other side closed")
            out += part
        return out

    return exact(struct.unpack("<I", exact(4))[0])


def tell(**values):
    print(json.dumps(values), flush=True)


def listen(host):
    """Tells the bench where, returns the one connection."""
    server = socket.create_server((host, 0))
    tell(address="%s:%d" % (host, server.getsockname()[1]))
    conn, _ = server.accept()
    return conn


def connect(address):
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)))


def serve_checks(conn, pages):
    """The target's loop: it ends with the connection."""
    while True:
        receive(conn)
        send(conn, b"1" if pages.verified() else b"0")


def obey(conn, move):
    """The initiator's loop over stdin; move() returns seconds."""
    tell(ready=True)
    for line in sys.stdin:
        if line.strip() == "go":
            tell(seconds=move())
        elif line.strip() == "check":
            send(conn, b"check")
            tell(verified=receive(conn) == b"1")
        else:
            raise SystemExit("unknown command %r" % line)


def device_of(host):
    """Name of the network device that has this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    raise SystemExit("no network device has the address %s" % host)


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["target", "initiator"])
    parser.add_argument("--pages", type=int, required=True)
    parser.add_argument("--page-bytes", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1", help="this side's address")
    parser.add_argument("--connect", help="HOST:PORT that the target printed")
    return parser.parse_args()
