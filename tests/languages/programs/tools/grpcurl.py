"""What of grpcurl the walk-through uses: `list`, `describe` and calls with JSON, by what the server tells of itself.

Stands in for grpcurl where it is not installed (Debian has no package of it). Knows nothing of spectrumkv.v1.
"""

import argparse
import json
import sys

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from google.rpc import error_details_pb2, status_pb2  # noqa: F401: details are printed by their types
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


def messages_of(text, kind):
    """Each JSON object of the text, as grpcurl reads the messages of a stream; one empty message where there is none."""
    decoder, at, found = json.JSONDecoder(), 0, []
    while at < len(text):
        value, end = decoder.raw_decode(text, at)
        found.append(json_format.ParseDict(value, kind()))
        at = end + len(text[end:]) - len(text[end:].lstrip())
    return found or [kind()]


def call(channel, pool, method, text):
    service, name = method.split("/")
    found = pool.FindServiceByName(service).FindMethodByName(name)
    requests = messages_of(text, message_factory.GetMessageClass(found.input_type))
    answer = message_factory.GetMessageClass(found.output_type)
    # gRPC's wire does not tell one message from a stream of one.
    invoke = channel.stream_stream(f"/{method}", lambda m: m.SerializeToString(), answer.FromString)
    for response in invoke(iter(requests), timeout=60):
        print(json_format.MessageToJson(response))


def explain(error):
    print(f"ERROR:\n  Code: {error.code().name}\n  Message: {error.details()}", file=sys.stderr)
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                print("  Details: " + json_format.MessageToJson(detail, indent=None), file=sys.stderr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-plaintext", action="store_true", required=True)
    parser.add_argument("-unix", action="store_true", required=True)
    parser.add_argument("-d", default="", dest="data")
    parser.add_argument("address")
    parser.add_argument("words", nargs="+")
    told = parser.parse_args()
    # Go's clients take a socket's path for the authority.
    with grpc.insecure_channel(f"unix:{told.address}", [("grpc.default_authority", told.address)]) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = descriptor_pool.DescriptorPool(database)
        if told.words == ["list"]:
            print("\n".join(sorted(database.get_services())))
        elif told.words[0] == "describe":
            file = pool.FindFileContainingSymbol(told.words[1])
            symbol = {**file.services_by_name, **file.message_types_by_name}[told.words[1].rpartition(".")[2]]
            members = getattr(symbol, "methods", None) or symbol.fields
            print("\n".join([f"{symbol.full_name}:", *(f"  {member.name}" for member in members)]))
        else:
            try:
                call(channel, pool, told.words[0], told.data)
            except grpc.RpcError as error:
                explain(error)
                sys.exit(64 + error.code().value[0])


main()
