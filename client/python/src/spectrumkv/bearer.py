"""Calls with a token, for a daemon that is reached over TCP."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


_EveryKind: Any = type("_EveryKind", (
    grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
), {})  # fmt: skip


class BearerToken(_EveryKind):  # type: ignore[misc]
    """Adds "authorization: Bearer TOKEN" to every call. The token is in no representation of it."""

    def __init__(self, token: str) -> None:
        self.__value = f"Bearer {token}"

    def _call(self, proceed: Callable[..., Any], details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), ("authorization", self.__value)]
        return proceed(_Details(details.method, details.timeout, metadata, details.credentials,
                                details.wait_for_ready, details.compression), request)  # fmt: skip

    def intercept_unary_unary(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        return self._call(continuation, client_call_details, request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        return self._call(continuation, client_call_details, request)

    def intercept_stream_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request_iterator: Any
    ) -> Any:
        return self._call(continuation, client_call_details, request_iterator)

    def intercept_stream_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request_iterator: Any
    ) -> Any:
        return self._call(continuation, client_call_details, request_iterator)


def read_token(path: str | os.PathLike[str]) -> str:
    """The token in a file as worker.tcp_token_file names it."""
    with open(path, encoding="ascii") as file:
        return file.read().removesuffix("\n")
