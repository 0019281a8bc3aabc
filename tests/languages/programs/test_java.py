"""A worker in Java, with Debian's gRPC packages, over worker.tcp_address."""

from conftest import EXAMPLES, build, check_round_trip, generated, need, run


def test_java_moves_a_cache(daemons):
    classpath = run([EXAMPLES / "java" / "compile", "--classpath"]).stdout.strip()
    need("Java", "java", "javac", "protoc", "grpc_java_plugin", files=classpath.split(":"))
    folder = generated("java")
    build([EXAMPLES / "java" / "generate", folder])
    build([EXAMPLES / "java" / "compile", folder])
    prefill, decode = daemons
    tokens = [daemon.keys["worker.tcp_token_file"] for daemon in daemons]
    command = ["java", "-cp", f"{classpath}:{folder}/classes", "RoundTrip"]
    check_round_trip([*command, prefill.worker_tcp, decode.worker_tcp, decode.peer, *tokens], daemons)
