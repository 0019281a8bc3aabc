#!/usr/bin/env python3
"""One side of Mooncake's transfer engine over TCP; see pages.py for how it is driven."""

import json
import os
import time

import pages as p

# Pages of one call. The engine's queue refuses 4096 and more by default, and larger batches are no faster.
MAX_BATCH = 2048


def engine(host, pages):
    from mooncake.engine import TransferEngine

    me = TransferEngine()
    if me.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("initialize failed")
    if me.register_memory(pages.pool.ctypes.data, pages.pool.nbytes) != 0:
        raise SystemExit("register_memory failed")
    return me


def target(args):
    pages = p.Pages(args, source=False)
    me = engine(args.host, pages)
    conn = p.listen(args.host)
    p.send(conn, json.dumps(["%s:%d" % (args.host, me.get_rpc_port()), pages.addresses()]).encode())
    p.serve_checks(conn, pages)


def initiator(args):
    pages = p.Pages(args, source=True)
    conn = p.connect(args.connect)
    me = engine(args.host, pages)
    peer, remote = json.loads(p.receive(conn))
    local, sizes = pages.addresses(), [pages.bytes] * pages.count
    parts = [slice(at, at + MAX_BATCH) for at in range(0, pages.count, MAX_BATCH)]

    def move():
        begin = time.monotonic()
        for part in parts:
            if me.batch_transfer_sync_write(peer, local[part], remote[part], sizes[part]) != 0:
                raise SystemExit("batch_transfer_sync_write failed")
        return time.monotonic() - begin

    p.obey(conn, move)


if __name__ == "__main__":
    os.environ.setdefault("MC_FORCE_TCP", "1")
    os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")
    arguments = p.arguments()
    (target if arguments.role == "target" else initiator)(arguments)
