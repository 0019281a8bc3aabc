"""vLLM engines, each in one process behind a little HTTP: a JSON list of {role, ready, log, options}. Run by the interpreter that
vLLM is installed for.

vLLM's own API server takes three processes and as much memory; scheduler, worker, connector and the ways of a request through
them are the same here. It answers POST /v1/completions (prompt or prompt_token_ids, max_tokens, kv_transfer_params, force: token
ids that are generated whatever the model says), POST /tokenize, /abort and /preempt (all that runs), GET /stats and /metrics.
"""

import ctypes
import itertools
import json
import os
import queue
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import prometheus_client  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor  # noqa: E402


class Forced(AdapterLogitsProcessor):
    """Generates extra_args["force"], so that the likelihood of a given text can be told."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        wanted = (params.extra_args or {}).get("force")
        if not wanted:
            return None

        def force(output_ids, logits):
            if len(output_ids) < len(wanted):
                logits[:] = float("-inf")
                logits[wanted[len(output_ids)]] = 0.0
            return logits

        return force


class Engine:
    """The engine's thread is the process's first; requests come from the server's threads."""

    def __init__(self, role, options):
        transfer = {
            "kv_connector": "SpectrumKVConnector", "kv_connector_module_path": "spectrumkv.vllm", "kv_role": role,
            "kv_load_failure_policy": "recompute", "kv_connector_extra_config": options.pop("extra"),
        }  # fmt: skip
        arguments = {
            "dtype": "float32", "block_size": 32, "max_model_len": 2048, "max_num_seqs": 8, "enforce_eager": True,
            "distributed_executor_backend": "uni", "kv_cache_memory_bytes": 256 << 20, "kv_transfer_config": transfer,
            "logits_processors": [Forced], "logprobs_mode": "raw_logprobs", **options,
        }  # fmt: skip
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.core = self.engine.engine_core.engine_core
        self.inbox = queue.Queue()
        self.waiting = {}
        self.names = itertools.count(1)
        self.steps = self.idle_steps = 0

    def run(self):
        while True:
            busy = self.core.scheduler.has_requests()
            self._take(block=not busy)
            if self.core.scheduler.has_requests():
                self._step()

    def _take(self, block):
        try:
            while True:
                what = self.inbox.get(block=block, timeout=0.2 if block else None)
                block = False
                what()
        except queue.Empty:
            pass

    def _step(self):
        self.steps += 1
        running = bool(self.core.scheduler.running)
        for out in self.engine.step():
            if out.finished:
                reply = self.waiting.pop(out.request_id, None)
                if reply is not None:
                    reply.put(answer(out))
        self.idle_steps += not running and not self.core.scheduler.running

    def complete(self, body):
        reply = queue.Queue()
        self.inbox.put(lambda: self._add(body, reply))
        out = reply.get()
        if isinstance(out, Exception):
            raise out
        return out

    def _add(self, body, reply):
        extra = {key: body[key] for key in ("kv_transfer_params", "force") if body.get(key)}
        try:
            params = SamplingParams(
                temperature=0, max_tokens=body.get("max_tokens", 16), logprobs=1, extra_args=extra, ignore_eos=bool(body.get("force"))
            )  # fmt: skip
            prompt = body.get("prompt_token_ids")
            name = body.get("request_id") or f"request-{next(self.names)}"
            self.waiting[name] = reply
            self.engine.add_request(name, {"prompt_token_ids": prompt} if prompt else body["prompt"], params,
                                    arrival_time=time.time())  # fmt: skip
        except Exception as error:  # noqa: BLE001: told to whoever asked
            reply.put(error)

    def abort(self, name):
        self.inbox.put(lambda: self._abort(name))

    def _abort(self, name):
        reply = self.waiting.pop(name, None)
        self.engine.abort_request([name])
        if reply is not None:
            reply.put({"choices": [{"finish_reason": "abort", "text": ""}]})

    def preempt(self):
        self.inbox.put(lambda: self.core.scheduler.reset_prefix_cache(reset_running_requests=True))

    def stats(self):
        scheduler = self.core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "steps": self.steps, "idle_steps": self.idle_steps, "requests": len(scheduler.requests),
            "free_blocks": pool.get_num_free_blocks(), "all_blocks": pool.num_gpu_blocks,
        }  # fmt: skip


def answer(out):
    done = out.outputs[0]
    logprobs = [next(one.logprob for token, one in step.items() if token == chosen)
                for step, chosen in zip(done.logprobs or [], done.token_ids)]  # fmt: skip
    return {
        "choices": [{"text": done.text, "token_ids": list(done.token_ids), "token_logprobs": logprobs,
                     "finish_reason": done.finish_reason}],
        "prompt_tokens": len(out.prompt_token_ids), "cached_tokens": out.num_cached_tokens,
        "kv_transfer_params": out.kv_transfer_params,
    }  # fmt: skip


def serve(engine, host):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            self._answer(200, engine.stats() if self.path == "/stats" else {"text": prometheus_client.generate_latest().decode()})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                return self._answer(200, {"tokens": engine.engine.get_tokenizer().encode(body["prompt"])})
            if self.path == "/abort":
                engine.abort(body["request_id"])
                return self._answer(200, {})
            if self.path == "/preempt":
                engine.preempt()
                return self._answer(200, {})
            try:
                self._answer(200, engine.complete(body))
            except Exception as error:  # noqa: BLE001: told to whoever asked
                self._answer(500, {"error": repr(error)})

        def _answer(self, status, body):
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer((host, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


def run(role, ready, options):
    host = options.pop("host", "127.0.0.1")
    engine = Engine(role, options)
    port = serve(engine, host)
    with open(ready + ".new", "w") as out:
        json.dump({"host": host, "port": port}, out)
    os.rename(ready + ".new", ready)
    engine.run()


def main():
    """Importing vLLM is half of a start: it is done once, and every engine is a fork of this process, which only waits."""
    children = {}
    for one in json.loads(sys.argv[1]):
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
            log = os.open(one["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            run(one["role"], one["ready"], one["options"])
        children[child] = one["role"]
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    gone, status = os.wait()
    sys.exit(f"the engine {children[gone]} has ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
