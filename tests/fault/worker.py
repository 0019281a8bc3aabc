"""A worker in a process of its own, so that it can be killed and stopped: SOCKET SHARED_DIR SEED.

Makes one pool in SHARED_DIR, registers it and takes orders as JSON, one a line. Says what it did as JSON, one a line.
"""

import json
import os
import sys
import threading
import time

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import contents  # noqa: E402

import spectrumkv as skv  # noqa: E402

_lock = threading.Lock()


def say(**told):
    with _lock:
        print(json.dumps(told), flush=True)


class Worker:
    def __init__(self, socket, shared_dir, seed):
        self.client = skv.Client(socket, timeout_s=10)
        self.seed = seed
        self._writers, self._wrote = 0, threading.Condition()
        self.pool = self.client.shared_memory_pool([contents.group()], model=contents.MODEL, shared_dir=shared_dir)
        if not self.pool.wait_held():  # else its death would be noticed by the end of the lease alone
            raise SystemExit("the daemon does not hold the pool")
        say(ready=self.pool.segment.name)

    def obey(self, order):
        """Each order on a thread of its own. Writers are counted here, so that a settle that is read later waits for them."""
        what = order.pop("do")
        if what == "start":
            with self._wrote:
                self._writers += 1
        threading.Thread(target=getattr(self, what), args=(order,), daemon=True).start()

    def start(self, order):
        """Calls send, publish, expect or fetch as the order says, and writes a layer-wise source bit by bit."""
        try:
            self._start(order)
        finally:
            with self._wrote:
                self._writers -= 1
                self._wrote.notify_all()

    def _start(self, order):
        name, role = order["name"], order["role"]
        options = dict(pool=self.pool, token_count=order["tokens"], blocks=order["blocks"], deadline_ms=order["deadline_ms"])
        if role in ("send", "publish"):
            kept = dict(retain_seconds=contents.RETAIN_S, refine="RAW") if order.get("refined") else {}
            options.update(policy=contents.policy(order["policy"], **kept), layerwise=order["layerwise"])
        else:
            refined = order.get("refined", False)
            options.update(refinable=refined, refine_direct=refined)
        if role in ("send", "fetch"):
            options["peer"] = order["peer"]
        try:
            getattr(self.client, role)(name, **options)
            say(name=name, role=role, event="started")
            if order.get("layerwise"):
                self.write_layers(order)
            if order.get("cached"):
                self.take_back(order)
        except skv.SpectrumKVError as error:
            say(name=name, role=role, event="refused", code=error.code, reason=error.reason, text=str(error))

    def settle(self, order):
        """Says so once nothing writes any more: a layer-wise source that has failed is known to its writer only when it
        advances, with a layer written."""
        with self._wrote:
            self._wrote.wait_for(lambda: self._writers == 0, 10)
            say(name=order["name"], event="settled", writers=self._writers)

    def write_layers(self, order):
        words = contents.words(self.seed, order["content"])
        cache = self.pool.kv().view("<u2")
        for layer in range(contents.LAYERS):
            time.sleep(order["pauses_s"][layer])
            contents.put_layers(cache, words, order["blocks"], [layer])
            if layer == contents.LAYERS - 1:
                say(name=order["name"], role=order["role"], event="last")
                time.sleep(0.004)  # a moment for who wants to break something just now
            self.client.advance(order["name"], layers=layer + 1, tokens=order["tokens"])
            say(name=order["name"], role=order["role"], event="advanced", layers=layer + 1)

    def take_back(self, order):
        """Lets the daemon's cache keep the words of a source that has committed, and uses its blocks for others at once."""
        name = order["name"]
        try:
            self.client.wait(name, role="SENDER", timeout_s=order["deadline_ms"] / 1000 + 2)
            time.sleep(0.1)  # others are still to hear of the commit, and without room the daemon forgets it
            kept = self.client.release(name, role="SENDER", keep_in_cache=True)
        except skv.SpectrumKVError:
            return  # it has not committed, or its daemon is gone
        cache = self.pool.kv().view("<u2")
        cache[:, :, order["blocks"]] = contents.POISON
        say(name=name, role=order["role"], event="taken_back", kept=kept)

    def another_pool(self, order):
        """Registers a second pool; on a full disk there is none."""
        try:
            with self.client.shared_memory_pool([contents.group()], model="more", shared_dir=order["shared_dir"]):
                say(name=order["name"], event="registered")
        except (OSError, skv.SpectrumKVError) as error:
            say(name=order["name"], event="refused", text=str(error), errno=getattr(error, "errno", None))


def main():
    worker = Worker(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    for line in sys.stdin:
        worker.obey(json.loads(line))
    # The end of the orders is the end of the worker; what it has reserved ends with it.
    os._exit(0)


if __name__ == "__main__":
    main()
