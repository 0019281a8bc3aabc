"""A relay on loopback that counts what passes, and can cut it or slow it down."""

import socket
import threading
import time

_PIECE = 1 << 16


class Pace:
    """Lets so many bytes a second pass, of all who ask together."""

    def __init__(self, bytes_per_second):
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._next = 0.0

    def wait(self, count):
        with self._lock:
            start = max(self._next, time.monotonic())
            self._next = start + count / self._rate
        time.sleep(max(0.0, self._next - time.monotonic()))


class Connection:
    """One accepted connection: bytes from the dialler (`up`) and to it (`down`)."""

    def __init__(self, dialler, target, pace=None):
        self._pace = pace
        self.up = self.down = 0
        self._ends = dialler, target
        self._threads = [
            threading.Thread(target=self._pump, args=(dialler, target, "up"), daemon=True),
            threading.Thread(target=self._pump, args=(target, dialler, "down"), daemon=True),
        ]
        self.limit = None
        for thread in self._threads:
            thread.start()

    def _pump(self, source, sink, name):
        try:
            while piece := source.recv(_PIECE):
                setattr(self, name, getattr(self, name) + len(piece))
                if self._pace is not None and name == "up":
                    self._pace.wait(len(piece))
                sink.sendall(piece)
                if self.limit is not None and self.up > self.limit:
                    self.cut()
        except OSError:
            pass
        self.cut()

    def cut(self):
        for end in self._ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


class Proxy:
    """Relays connections to `target` ("host:port") from `address`. cut_after: the first connection that has carried so
    many bytes upwards is cut, once. bytes_per_second: no more passes upwards, over all connections together."""

    def __init__(self, target, cut_after=None, bytes_per_second=None):
        host, port = target.rsplit(":", 1)
        self._target = host, int(port)
        self._cut_after = cut_after
        self._pace = None if bytes_per_second is None else Pace(bytes_per_second)
        self.connections = []
        # While down it hangs up on everybody; when it did, by time.monotonic().
        self.is_down, self.hung_up = False, []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                dialler, _ = self._server.accept()
            except OSError:
                return
            if self.is_down:
                self.hung_up.append(time.monotonic())
                dialler.close()
                continue
            try:
                connection = Connection(dialler, socket.create_connection(self._target), self._pace)
            except OSError:
                dialler.close()
                continue
            self.connections.append(connection)

    def break_down(self):
        """Cuts all connections, and carries no other until is_down is False."""
        self.is_down = True
        for connection in self.connections:
            connection.cut()

    def limit(self, up):
        """Cuts each of the present connections once it has carried so many bytes upwards."""
        for connection in self.connections:
            connection.limit = up

    def total(self):
        return sum(connection.up + connection.down for connection in self.connections)

    def close(self):
        self._server.close()
        for connection in self.connections:
            connection.cut()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
