#!/usr/bin/env python3
"""One side of NIXL with UCX over TCP, memory of the host; see pages.py for how it is driven.

The descriptors are prepared once and only the transfer is timed, which is kind to NIXL: a real request has new blocks.
The initiator polls by itself: with a progress thread beside it, it is slower on a machine of few cores.
"""

import os
import time

import pages as p


def agent(name, progress_thread):
    from nixl_cu12 import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"]))


def descriptors(me, pages):
    return me.get_xfer_descs([(address, pages.bytes, 0) for address in pages.addresses()], "DRAM")


def target(args):
    pages = p.Pages(args, source=False)
    me = agent("target", True)
    me.register_memory([(pages.pool.ctypes.data, pages.pool.nbytes, 0, "")], "DRAM")
    conn = p.listen(args.host)
    p.send(conn, me.get_agent_metadata())
    p.send(conn, me.get_serialized_descs(descriptors(me, pages)))
    me.add_remote_agent(p.receive(conn))
    p.serve_checks(conn, pages)


def initiator(args):
    pages = p.Pages(args, source=True)
    conn = p.connect(args.connect)
    me = agent("initiator", False)
    me.register_memory([(pages.pool.ctypes.data, pages.pool.nbytes, 0, "")], "DRAM")
    peer = me.add_remote_agent(p.receive(conn))
    remote = me.deserialize_descs(p.receive(conn))
    p.send(conn, me.get_agent_metadata())
    handle = me.initialize_xfer("WRITE", descriptors(me, pages), remote, peer.decode() if isinstance(peer, bytes) else peer)

    def move():
        begin = time.monotonic()
        state = me.transfer(handle)
        while state == "PROC":
            state = me.check_xfer_state(handle)
        if state != "DONE":
            raise SystemExit("transfer: %s" % state)
        return time.monotonic() - begin

    p.obey(conn, move)


if __name__ == "__main__":
    arguments = p.arguments()
    os.environ.setdefault("UCX_TLS", "tcp,self")
    os.environ.setdefault("UCX_NET_DEVICES", p.device_of(arguments.host))
    (target if arguments.role == "target" else initiator)(arguments)
