"""One fault in the middle of one transfer, in a network namespace of its own; failures.py starts it.

Prints one JSON line: seconds from the signal to the error (null: none within the bound) and what the API said.
"""

import json
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).parent
MIB = 1 << 20
TRANSFER_BYTES, PAGE_BYTES = 64 * MIB, MIB
UNDER_WAY_BYTES = 8 * MIB
UNDER_WAY_S = 30.0
# tbf takes whole packets of the loopback device, 64 KiB, out of the burst.
SHAPE = "rate 100mbit burst 256kb limit 4mb".split()
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
# What a peer's script says last; the lines of the systems' own logs look otherwise.
LAST_WORDS = re.compile(r"^(Traceback|transfer: |batch_transfer_sync_write failed)")


def shape_loopback():
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *SHAPE], check=True)


def loopback_bytes():
    for line in pathlib.Path("/proc/self/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[0])
    raise SystemExit("there is no loopback device")


def wait_under_way(before, over):
    """Returns when a part of the transfer has crossed the link; `over` tells whether it has ended already."""
    end = time.monotonic() + UNDER_WAY_S
    while loopback_bytes() - before < UNDER_WAY_BYTES:
        if over() or time.monotonic() > end:
            raise SystemExit("the transfer was not under way when the fault was due")
        time.sleep(0.005)
    if over():
        raise SystemExit("the transfer was over before the fault")


def hit(pid, fault):
    os.kill(pid, SIGNALS[fault])
    return time.monotonic()


def ours(case):
    os.environ["SPECTRUMKVD"] = case["daemon"]
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    sys.path.insert(0, str(HERE.parent / "integration" / "python"))
    from ends import Ends
    from real_daemon import running

    import spectrumkv as skv

    keys = {"transfer__progress_timeout_ms": case["progress_timeout_ms"]} if case["progress_timeout_ms"] else {}
    group = skv.Group(layers=range(8), heads=8, head_dim=128, block_tokens=16, num_blocks=160)
    with running(**keys) as prefill, running(**keys) as decode:
        source, target = prefill.client(), decode.client()
        both = Ends(source, target, prefill, decode, "failure", group=group, tokens=TRANSFER_BYTES // (8 * 2 * 8 * 128 * 2))
        peer, seen = (decode, source) if case["seen_by"] == "sender" else (prefill, target)
        before = loopback_bytes()
        both.expect()
        both.send()
        states = (skv.v1.report_pb2.TRANSFER_STATE_COMMITTED, skv.v1.report_pb2.TRANSFER_STATE_FAILED)
        wait_under_way(before, lambda: seen.get_transfer("failure").state in states)
        begin = hit(peer.process.pid, case["fault"])
        try:
            seen.wait("failure", timeout_s=case["bound_s"])
            raise SystemExit("the transfer committed")
        except skv.TransferFailed as failed:
            answer = {"seconds": time.monotonic() - begin, "said": "%s %s" % (failed.code, failed.reason)}
        except (skv.SpectrumKVError, TimeoutError):
            answer = {"seconds": None, "said": ""}
        peer.kill()
        # The pools' other daemon is dead: nothing of this process is worth an orderly end.
        for daemon in (prefill, decode):
            daemon.remove()
        both.here.pool.segment.close()
        both.there.pool.segment.close()
        print(json.dumps(answer), flush=True)
        os._exit(0)


def stamped_lines(stream, tag, into):
    for line in stream:
        into.put((tag, time.monotonic(), line.rstrip()))
    into.put((tag, time.monotonic(), None))


def start_side(case, *arguments):
    script = HERE / "peers" / ("%s_peer.py" % case["system"])
    sizes = ["--pages", str(TRANSFER_BYTES // PAGE_BYTES), "--page-bytes", str(PAGE_BYTES)]
    return subprocess.Popen([case["peer_python"], str(script), *arguments, *sizes], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip


def json_line(lines):
    """The next line of the line protocol; systems log to stdout, too."""
    while True:
        tag, _, line = lines.get(timeout=60)
        if tag == "out" and line is None:
            raise SystemExit("a side ended before it answered")
        if tag == "out" and line.startswith("{"):
            return json.loads(line)


def listen_to(process):
    lines = queue.Queue()
    for tag, stream in (("out", process.stdout), ("err", process.stderr)):
        threading.Thread(target=stamped_lines, args=(stream, tag, lines), daemon=True).start()
    return lines


def await_error(lines, begin, bound_s):
    """When the initiator's script told of an error, and its last line."""
    told, said = None, ""
    while True:
        left = begin + bound_s - time.monotonic() if told is None else 2.0
        try:
            tag, at, line = lines.get(timeout=max(left, 0.001))
        except queue.Empty:
            break
        if tag == "out" and line and line.startswith("{"):
            raise SystemExit("the transfer ended: %s" % line)
        if tag == "err" and line is None:
            told, said = told or at, said or "the process ended without a word"
            break
        if tag == "err" and told is None and LAST_WORDS.match(line):
            told, said = at, line
        elif tag == "err" and told is not None and re.match(r"^[A-Za-z_][\w.]*(Error|Exception)\b", line):
            said = line
    return {"seconds": told - begin if told else None, "said": said}


def peers(case):
    target = start_side(case, "target")
    initiator = None
    try:
        address = json_line(listen_to(target))["address"]
        initiator = start_side(case, "initiator", "--connect", address)
        lines = listen_to(initiator)
        json_line(lines)
        before = loopback_bytes()
        initiator.stdin.write("go\n")
        initiator.stdin.flush()
        wait_under_way(before, lambda: initiator.poll() is not None)
        begin = hit(target.pid, case["fault"])
        print(json.dumps(await_error(lines, begin, case["bound_s"])), flush=True)
    finally:
        for process in (target, initiator):
            if process is not None:
                process.kill()
                process.wait()


if __name__ == "__main__":
    shape_loopback()
    wanted = json.loads(sys.argv[1])
    (ours if wanted["system"] == "ours" else peers)(wanted)
