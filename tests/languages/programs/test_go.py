"""A worker in Go, with Debian's gRPC packages."""

import os

from conftest import EXAMPLES, ROOT, build, check_round_trip, generated, need

GOCODE = "/usr/share/gocode"


def test_go_moves_a_cache(daemons):
    need("Go", "go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc",
         files=[f"{GOCODE}/src/google.golang.org/{name}" for name in ("grpc", "protobuf", "genproto")])  # fmt: skip
    folder = generated("go")
    build([EXAMPLES / "go" / "generate", folder])
    build(["go", "build", "-o", folder / "roundtrip", "./client/examples/go"], cwd=ROOT,
          env={**os.environ, "GO111MODULE": "off", "GOPATH": f"{folder}:{GOCODE}", "GOCACHE": str(folder / "cache")})  # fmt: skip
    prefill, decode = daemons
    check_round_trip([folder / "roundtrip", prefill.worker, decode.worker, decode.peer], daemons)
