"""The dependency law as data: what each folder may include and link. docs/architecture.md says why.

A folder may use what is listed here and nothing else, so a new dependency is a change of this file. `tests` may use
everything; nothing may use `tests`.
"""

from dataclasses import dataclass

KERNELS = ("kernels/format", "kernels/codec", "kernels/cpu", "kernels/cuda")


@dataclass(frozen=True)
class Rule:
    """What a folder may use: other folders, and third parties by the names of THIRD_PARTIES."""

    folders: tuple = ()
    third: tuple = ()
    # Standard headers that would break a promise of the folder.
    forbidden: tuple = ()


CLOCK_AND_IO = ("chrono", "ctime", "time.h", "thread", "fstream", "iostream", "filesystem", "unistd.h",
                "sys/socket.h", "random")

LAW = {
    "kernels/format": Rule(),
    "kernels/codec": Rule(("kernels/format",)),
    "kernels/cpu": Rule(("kernels/format", "kernels/codec")),
    "kernels/cuda": Rule(("kernels/format", "kernels/codec"), ("cuda",)),
    "server/base": Rule((), ("absl",)),
    "server/config": Rule(("server/base",), ("absl", "yaml")),
    "server/metrics": Rule(("server/base",), ("absl", "prometheus")),
    "server/memory": Rule(("server/base", "kernels/cuda"), ("absl",)),
    "server/pool": Rule(("server/base", "server/memory", "kernels/format"), ("absl",)),
    "server/plan": Rule(("server/base", "kernels/format", "kernels/codec"), ("absl",), CLOCK_AND_IO),
    # Trials and verdicts; moves nothing.
    "server/probe": Rule(("server/base", "server/plan", "kernels/format"), ("absl",)),
    "server/scan": Rule(("server/base", "server/memory", "server/pool", "server/plan", *KERNELS), ("absl",)),
    "server/encode": Rule(("server/base", "server/memory", "server/pool", "server/plan", *KERNELS), ("absl",)),
    # Moves opaque chunks: knows no tier, so neither the planner nor the codecs.
    "server/stream": Rule(("server/base", "server/memory", "server/metrics"), ("absl", "grpc", "openssl", "proto")),
    "server/decode": Rule(("server/base", "server/memory", "server/pool", "server/plan", *KERNELS), ("absl",)),
    "server/transfer": Rule(("server/base", "server/metrics", "server/memory", "server/pool", "server/scan",
                             "server/plan", "server/encode", "server/stream", "server/decode", *KERNELS), ("absl",)),
    "server/service": Rule(("server/base", "server/config", "server/metrics", "server/memory", "server/pool",
                            "server/scan", "server/plan", "server/probe", "server/stream", "server/transfer", *KERNELS),
                           ("absl", "grpc", "proto")),
    "server/lifecycle": Rule(("server/base", "server/config", "server/metrics", "server/memory", "server/pool",
                              "server/scan", "server/plan", "server/probe", "server/encode", "server/stream", "server/decode",
                              "server/transfer", "server/service", "cmake", *KERNELS), ("absl", "grpc")),
    "server": Rule(("server/lifecycle", "server/config", "server/base", "cmake"), ("absl",)),  # main.cc
    "client/cpp": Rule((), ("absl", "grpc", "proto")),
    # The installed headers: the standard library alone. What is behind them is free to change.
    "client/sdk/spectrumkv": Rule(),
    "client/sdk": Rule(("client/cpp", "client/sdk/spectrumkv"), ("absl", "proto")),
    "client/ctl": Rule(("client/cpp", "cmake", *KERNELS), ("absl", "grpc", "proto")),
    "client/examples": Rule(("client/sdk/spectrumkv",)),  # as a project outside
    "cmake": Rule(),  # version.h
}

# Include prefixes of each third party, and the CMake targets that bring it.
THIRD_PARTIES = {
    "absl": (("absl/",), ("absl::",)),
    "grpc": (("grpc/", "grpcpp/", "grpc++/", "grpcpp."), ("gRPC::",)),
    "openssl": (("openssl/",), ("OpenSSL::",)),
    "proto": (("google/protobuf/", "google/rpc/", "spectrumkv/v1/"), ("spectrumkv_proto", "protobuf::")),
    "yaml": (("yaml-cpp/",), ("yaml-cpp",)),
    "prometheus": (("prometheus/",), ("prometheus-cpp::",)),
    "cuda": (("cuda", "cooperative_groups"), ("CUDA::",)),
    "gtest": (("gtest/", "gmock/"), ("GTest::",)),
}

# CMake targets that are no folder of ours and that anyone may link.
FREE_TARGETS = {"spectrumkv_flags", "Threads::Threads"}
# Libraries that are not named spectrumkv_<last part of their folder>.
TARGET_NAMES = {"client/cpp": "spectrumkv_client", "client/sdk": "spectrumkv", "cmake": "spectrumkv_version",
                "server": "spectrumkvd"}
