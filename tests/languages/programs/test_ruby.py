"""A worker in Ruby, with Debian's gRPC packages."""

import subprocess

import pytest
from conftest import EXAMPLES, build, check_round_trip, generated, need


def test_ruby_moves_a_cache(daemons):
    need("Ruby", "/usr/bin/ruby", "protoc", "grpc_ruby_plugin")
    if subprocess.run(["/usr/bin/ruby", "-e", "require 'grpc'"], capture_output=True, check=False).returncode != 0:
        pytest.skip("SKIPPED: Ruby: no ruby-grpc; scripts/install-deps installs it")
    folder = generated("ruby")
    build([EXAMPLES / "ruby" / "generate", folder])
    prefill, decode = daemons
    command = ["/usr/bin/ruby", f"-I{folder}", EXAMPLES / "ruby" / "round_trip.rb"]
    check_round_trip([*command, prefill.worker, decode.worker, decode.peer], daemons)
