"""A WorkerService in this process, as far as the client library's own behaviour needs one: leases, epochs, errors."""

import queue
import threading
import time
from concurrent import futures

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from spectrumkv.v1 import report_pb2, worker_service_pb2, worker_service_pb2_grpc

CODES = {code.value[0]: code for code in grpc.StatusCode}


def abort(context, code, reason, message, metadata=None, retry_ms=None):
    status = status_pb2.Status(code=code.value[0], message=message)
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(domain="spectrumkv", reason=reason, metadata=metadata or {}))
    status.details.append(info)
    if retry_ms is not None:
        wait = error_details_pb2.RetryInfo()
        wait.retry_delay.FromMilliseconds(retry_ms)
        status.details.add().Pack(wait)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, message)


class FakeWorker(worker_service_pb2_grpc.WorkerServiceServicer):
    def __init__(self):
        self.epoch = 1
        self.pools = {}  # pool_id -> schema
        self.requests = []
        self.pings = queue.Queue()
        self.answers_holds = threading.Event()
        self.answers_holds.set()
        self.hold_events = queue.Queue()  # put an event here: the current hold stream ends with it
        self.registration_failures = []  # as failures, of RegisterPool
        self.answers_registrations = threading.Event()
        self.answers_registrations.set()
        self.registered_at = []  # time.monotonic() of every RegisterPool
        self.failures = []  # (code, reason, message, metadata, retry_ms), raised by the next calls
        self.events = []  # of WatchTransfer
        self.blocks = {}
        self.lease_ttl_ms = 90
        self.lock = threading.Lock()

    def restart(self):
        with self.lock:
            self.epoch += 1
            self.pools.clear()

    def _enter(self, request, context):
        self.requests.append(request)
        if self.failures:
            code, reason, message, metadata, retry_ms = self.failures.pop(0)
            abort(context, code, reason, message, metadata, retry_ms)
        if hasattr(request, "pool"):
            self._check(request.pool, context)

    def _check(self, ref, context):
        if ref.epoch != self.epoch:
            abort(context, grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH", "the daemon has restarted",
                  {"epoch": str(self.epoch)})  # fmt: skip
        if ref.pool_id not in self.pools:
            abort(context, grpc.StatusCode.NOT_FOUND, "UNKNOWN_POOL", "no such pool")

    def RegisterPool(self, request, context):
        self.registered_at.append(time.monotonic())
        if self.registration_failures:
            abort(context, *self.registration_failures.pop(0))
        self.answers_registrations.wait(20)
        with self.lock:
            pool_id = f"pool-{self.epoch}-{len(self.pools)}"
            self.pools[pool_id] = request.schema
        response = worker_service_pb2.RegisterPoolResponse(lease_ttl_ms=request.lease_ttl_ms or self.lease_ttl_ms)
        response.pool.pool_id, response.pool.epoch = pool_id, self.epoch
        return response

    def HoldPool(self, requests, context):
        first = next(requests)
        self._check(first.pool, context)
        self.pings.put(first.pool)

        def read():
            try:
                for request in requests:
                    self.pings.put(request.pool)
            except grpc.RpcError:
                pass  # the client has gone

        threading.Thread(target=read, daemon=True).start()
        self.answers_holds.wait(20)
        yield worker_service_pb2.HoldPoolResponse(lease_ttl_ms=self.lease_ttl_ms)
        while context.is_active():
            try:
                event = self.hold_events.get(timeout=0.02)
            except queue.Empty:
                continue
            yield worker_service_pb2.HoldPoolResponse(event=event)
            return

    def UnregisterPool(self, request, context):
        self._enter(request, context)
        del self.pools[request.pool.pool_id]
        return worker_service_pb2.UnregisterPoolResponse()

    def PutBlocks(self, requests, context):
        ref, count, size = None, 0, 0
        for request in requests:
            if ref is None:
                ref = request.pool
                self._check(ref, context)
            self.requests.append(request)
            for block in request.blocks:
                self.blocks[block.layer, block.plane, block.block] = block.data
                count, size = count + 1, size + len(block.data)
        return worker_service_pb2.PutBlocksResponse(blocks=count, bytes=size)

    def GetBlocks(self, request, context):
        self._enter(request, context)
        for (layer, plane, block), data in self.blocks.items():
            if any(run.first <= block < run.first + run.count for run in request.runs):
                response = worker_service_pb2.GetBlocksResponse()
                response.blocks.add(layer=layer, plane=plane, block=block, data=data)
                yield response

    def Send(self, request, context):
        self._enter(request, context)
        return worker_service_pb2.SendResponse(epoch=self.epoch)

    def Advance(self, request, context):
        self._enter(request, context)
        return worker_service_pb2.AdvanceResponse()

    def WatchTransfer(self, request, context):
        self._enter(request, context)
        yield from self.events

    def CancelTransfer(self, request, context):
        self._enter(request, context)
        report = report_pb2.TransferReport(transfer_id=request.transfer.transfer_id)
        return worker_service_pb2.CancelTransferResponse(report=report)


class FakeDaemon:
    """Serves a FakeWorker on a Unix socket until stop()."""

    def __init__(self, path):
        self.worker = FakeWorker()
        self.path = str(path)
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(self.worker, self._server)
        self._server.add_insecure_port(f"unix:{self.path}")
        self._server.start()

    def stop(self):
        self._server.stop(grace=0).wait()
