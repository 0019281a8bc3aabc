"""Every field of every message between daemons, found from the descriptors, and wrong values for each."""

from google.protobuf.descriptor import FieldDescriptor as F
from google.protobuf.message_factory import GetMessageClass

from spectrumkv.v1 import peer_service_pb2 as pb

_VARINT = (F.TYPE_UINT32, F.TYPE_UINT64, F.TYPE_INT32, F.TYPE_INT64, F.TYPE_BOOL, F.TYPE_ENUM)
_FIXED64 = (F.TYPE_FIXED64, F.TYPE_DOUBLE)
LONG = 1 << 20


def _below(descriptor, prefix):
    for field in descriptor.fields:
        path = (*prefix, field.name)
        yield path
        if field.type == F.TYPE_MESSAGE:
            yield from _below(field.message_type, path)


def all_paths():
    """("hello", "shape", "groups", "layers"), ... of frames, and ("open", "session"), ("chunk",) of a Data stream."""
    frames = pb.ControlFrame.DESCRIPTOR
    paths = list(_below(frames, ()))
    for request, response in ((pb.DataRequest, pb.DataResponse), (pb.ControlRequest, pb.ControlResponse)):
        assert [f.name for f in request.DESCRIPTOR.fields] == [f.name for f in response.DESCRIPTOR.fields]
    assert [f.name for f in pb.ControlRequest.DESCRIPTOR.fields] == ["frame"]
    return paths + list(_below(pb.DataRequest.DESCRIPTOR, ()))


def field_of(descriptor, path):
    for name in path[:-1]:
        descriptor = descriptor.fields_by_name[name].message_type
    return descriptor.fields_by_name[path[-1]]


def varint(value):
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def part(number, payload):
    """A field with a length."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def _numbers(field, honest):
    if field.type == F.TYPE_BOOL:
        return [not honest]
    if field.type == F.TYPE_ENUM:
        return [*(value.number for value in field.enum_type.values), 99, 2**31 - 1, -1]
    if field.type == F.TYPE_INT32:
        return [-1, 7, 2**31 - 1, -(2**31)]
    if field.type == F.TYPE_DOUBLE:
        return [float("nan"), float("inf"), float("-inf"), -1.0, 1e308]
    most = 2**32 - 1 if field.type in (F.TYPE_UINT32, F.TYPE_FIXED32) else 2**64 - 1
    return [0, 1, honest + 1, most // 2 + 1, most]


def _texts(field):
    if field.type == F.TYPE_BYTES:
        return [b"", b"\0" * 15, b"\xa5" * 16, b"\0" * 17, b"\0" * LONG]
    return ["", "x" * 200, "a\n2026-01-01T00:00:00Z error forged", "\x1b[2J\0", "x" * LONG]


def _scalars(field, honest):
    return _texts(field) if field.type in (F.TYPE_STRING, F.TYPE_BYTES) else _numbers(field, honest)


def _raw(field):
    """Bytes in the field's place that no serializer would write."""
    number = field.number
    yield "another wire type", varint(number << 3 | 5) + b"\1\2\3\4"
    yield "a group", varint(number << 3 | 3) + varint(number << 3 | 4)
    if field.type in _VARINT:
        yield "a varint without end", varint(number << 3) + b"\xff" * 11
    elif field.type in _FIXED64:
        yield "half a number", varint(number << 3 | 1) + b"\1\2\3"
    else:
        yield "a length beyond the end", varint(number << 3 | 2) + b"\xff\xff\xff\x7f"
        if field.type == F.TYPE_STRING:
            yield "no UTF-8", part(number, b"\xff\xfe\xc0")
        if field.type == F.TYPE_MESSAGE:
            yield "garbage", part(number, b"\xff" * 40)


def _put(message, path, change):
    """`message` with change(parent, field) -> bytes in the place of the field, which has been cleared."""
    copy = type(message)()
    copy.CopyFrom(message)
    field = copy.DESCRIPTOR.fields_by_name[path[0]]
    if len(path) == 1:
        if not field.is_repeated:
            copy.ClearField(path[0])
        return change(copy, field)
    child = getattr(copy, path[0])
    rest = []
    if field.is_repeated:
        rest, child = list(child)[1:], child[0] if child else GetMessageClass(field.message_type)()
    inside = _put(child, path[1:], change)
    copy.ClearField(path[0])
    return copy.SerializeToString() + part(field.number, inside) + b"".join(part(field.number, m.SerializeToString()) for m in rest)


def _with_value(value):
    def change(parent, field):
        if field.is_repeated:
            parent.ClearField(field.name)
            getattr(parent, field.name).extend(value)
        else:
            setattr(parent, field.name, value)
        return parent.SerializeToString()

    return change


def _with_bytes(raw):
    def change(parent, field):
        parent.ClearField(field.name)
        return parent.SerializeToString() + raw

    return change


def _honest(message, path):
    for name in path:
        if message.DESCRIPTOR.fields_by_name[name].is_repeated and name != path[-1]:
            repeated = getattr(message, name)
            message = repeated[0] if repeated else GetMessageClass(message.DESCRIPTOR.fields_by_name[name].message_type)()
        else:
            message = getattr(message, name)
    return message


def wrongs(message, path):
    """(what, bytes) of `message`, a frame or a Data message, with the field at `path` wrong in every way."""
    told = {message.SerializeToString()}
    for what, data in _wrongs(message, path):
        if data not in told:
            told.add(data)
            yield what, data


def _wrongs(message, path):
    field = field_of(message.DESCRIPTOR, path)
    honest = _honest(message, path)
    if field.is_repeated:
        elements = list(honest)
        yield "nothing", _put(message, path, _with_value([]))
        if elements:
            yield "twice", _put(message, path, _with_value(elements + elements))
            yield "backwards", _put(message, path, _with_value(elements[::-1]))
            yield "very many", _put(message, path, _with_value(elements * (60000 // len(elements))))
        if field.type != F.TYPE_MESSAGE:
            for value in _numbers(field, elements[0] if elements else 0):
                yield f"[{value}]", _put(message, path, _with_value([value]))
    elif field.type == F.TYPE_MESSAGE:
        yield "nothing", _put(message, path, lambda parent, _: parent.SerializeToString())
        yield "empty", _put(message, path, _with_bytes(part(field.number, b"")))
    else:
        for value in _scalars(field, honest):
            if value != honest:
                yield repr(value)[:60], _put(message, path, _with_value(value))
    for what, raw in _raw(field):
        yield what, _put(message, path, _with_bytes(raw))
