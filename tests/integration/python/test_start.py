"""Starts that cannot be: the daemon names the key, the value and the cause, in its own log format, and never aborts."""

import json
import os
import pathlib
import re
import resource
import shutil
import socket
import subprocess
import tempfile

import pytest
from real_daemon import PROGRAM, running

ADDRESSES = ["peer.listen_address", "health.listen_address", "metrics.listen_address", "worker.tcp_address"]
NOBODY = 65534


def refused_start(keys, preexec_fn=None, folder=None):
    """(exit status, lines of the log) of a daemon that is expected to end by itself; it is ended after a minute."""
    own = folder or pathlib.Path(tempfile.mkdtemp(prefix="skv-"))
    all_keys = {
        "worker.socket": f"{own}/worker.sock",
        "admin.socket": f"{own}/admin.sock",
        "peer.security": "plain",
        **{f"{name}.listen_address": "127.0.0.1:0" for name in ("peer", "health", "metrics")},
        "memory.shared_dir": str(own),
        "memory.send_slots": "4",
        "memory.receive_slots": "4",
        **keys,
    }
    if "worker.tcp_address" in keys:
        (own / "token").write_text("a-token-of-this-test\n")
        all_keys["worker.tcp_token_file"] = own / "token"
    flags = [part for name, value in all_keys.items() for part in ("--set", f"{name}={value}")]
    ready = own / "ready.json"
    try:
        process = subprocess.Popen([PROGRAM, "--ready-file", ready, *flags], stdin=subprocess.DEVNULL, text=True,
                                   stderr=subprocess.PIPE, preexec_fn=preexec_fn)  # fmt: skip
        try:
            for line in process.stderr if folder else ():  # it may come up: then it is asked to end
                if " ready" in line or '"ready"' in line:
                    process.terminate()
                    return process.wait(60), [line, *process.stderr]
                if "cannot start" in line:
                    return process.wait(60), [line, *process.stderr]
            _, log = process.communicate(timeout=60)
            return process.returncode, log.splitlines()
        finally:
            process.kill()
            process.wait()
            process.stderr.close()
    finally:
        if folder is None:
            shutil.rmtree(own, ignore_errors=True)


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("key", ADDRESSES)
def test_an_address_in_use_is_named_with_key_and_cause(key, form):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, log = refused_start({key: address, "log.format": form})
    assert code == 1
    last = log[-1]
    if form == "json":
        last = json.loads(last)["error"]
    assert re.search(rf"{re.escape(key)}: cannot listen on {address}: .*EADDRINUSE", last), log


def test_an_address_of_another_machine_is_named():
    """TEST-NET-1 of RFC 5737: nobody has it."""
    for key in ADDRESSES[:3]:
        code, log = refused_start({key: "192.0.2.1:7420"})
        assert code == 1 and re.search(rf"{re.escape(key)}: cannot listen on 192.0.2.1:7420: .*EADDRNOTAVAIL", log[-1]), log


@pytest.mark.parametrize("key", ["worker.socket", "admin.socket"])
def test_a_socket_in_use_is_named_with_its_key(key, decode):
    path = decode.worker if key == "worker.socket" else decode.admin_socket
    code, log = refused_start({key: path})
    assert code == 1 and "reason=SOCKET_IN_USE" in log[-1] and f"{key}: {path} belongs to another daemon" in log[-1], log


def test_every_line_is_one_event_of_the_chosen_format(tmp_path):
    """gRPC has words of its own for failures; they are events like all others."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for key in ADDRESSES:
            _, log = refused_start({key: address, "log.format": "json"})
            events = [json.loads(line) for line in log]  # each of them
            assert all(event.keys() >= {"ts", "level", "module", "message"} for event in events)
            if key != "metrics.listen_address":
                assert any(event["module"] == "grpc" for event in events), "gRPC said nothing: this test proves nothing"
            _, log = refused_start({key: address})
            assert all(re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z (debug|info|warning|error) [a-z]+ ", line) for line in log)


def test_a_daemon_that_serves_logs_only_events():
    """Handshakes that fail are told by gRPC, too."""
    with running(**{"log.format": "json"}) as daemon:
        host, port = daemon.peer.rsplit(":", 1)
        for greeting in (b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff" * 9):
            with socket.create_connection((host, int(port)), timeout=20) as raw:
                raw.sendall(greeting)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
        daemon.stop()
        for line in daemon.log().splitlines():
            json.loads(line)


def _limited(folder, threads):
    """Ends in a process of a user with no other processes, who may have so many threads."""

    def prepare():
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
            os.setresuid(NOBODY, NOBODY, NOBODY)
        else:
            resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))

    return prepare


@pytest.mark.parametrize("threads", [1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 1000])
def test_too_few_threads_are_told_at_start(threads):
    """At every limit the daemon either comes up or says what it lacks; no library aborts it."""
    if os.geteuid() != 0 and threads == 1000:
        pytest.skip("SKIPPED: threads of this user's other processes count, so it cannot be told how many are enough")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="skv-"))
    try:
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        code, log = refused_start({}, _limited(folder, threads), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if threads == 1000:
        assert code == 0 and " ready" in log[0], log
    elif code != 0:
        log = [line for line in log if not line.startswith("==") and line.strip()]  # a sanitizer's, of threads it lacks
        assert code == 1 and "reason=OUT_OF_THREADS" in log[-1], (code, log)
        told = re.search(r"needs (\d+) threads .* the system gives (\d+): RLIMIT_NPROC is (\d+)", log[-1])
        assert told and int(told[2]) < int(told[1]) and int(told[3]) == threads, log
