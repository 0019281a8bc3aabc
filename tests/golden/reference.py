# Independent of the C++ code on purpose: written from proto/WIRE_FORMAT.md alone. Nothing at build or run time needs it.
"""Numpy reference of the chunk format (proto/WIRE_FORMAT.md). Slow, plain, meant to be compared against, not shipped.

encode(k, v, tiers_k, tiers_v, **header) -> bytes;  decode(chunk) -> (header, k, v, tiers_k, tiers_v)
k, v: arrays [T, H, D] of raw words: uint16 (float16, bfloat16) or uint32 (float32). v may be None.
tiers_*: uint8 [T], one tier for all heads of a token.
"""
import struct
import numpy as np

f32 = np.float32
F16, BF16, F32 = 1, 2, 3
RAW, P8, Q4, Q3, Q2, P4, Q8 = range(7)
STEPPED = {Q4: 4, Q3: 3, Q2: 2}
ROTATED = (Q8, Q4, Q3, Q2)
PLAIN = {P8: 127, P4: 7}
LIMIT_ROTATED, LIMIT_PLAIN = f32(1024), f32(65504)
CODE_ORDER = (RAW, Q8, P8, P4, Q4, Q3, Q2)


def step(bits, d):
    table = (17 / 128, 1 / 4, 15 / 32) if d <= 64 else (1 / 8, 15 / 64, 13 / 32) if d <= 128 else (1 / 8, 29 / 128, 3 / 8)
    return np.float32(table[4 - bits])


class Refused(ValueError):
    pass


def crc32c(data):
    table = crc32c.table
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


crc32c.table = []
for _n in range(256):
    for _ in range(8):
        _n = (_n >> 1) ^ (0x82F63B78 if _n & 1 else 0)
    crc32c.table.append(_n)


def widen(words, dtype):
    if dtype == F16:
        return words.view(np.float16).astype(f32)
    if dtype == BF16:
        return (words.astype(np.uint32) << 16).view(f32)
    return words.view(f32)


def narrow(x, dtype):
    x = x.astype(f32)
    if dtype == F32:
        return x.view(np.uint32)
    if dtype == F16:
        with np.errstate(over="ignore"):
            h = x.astype(np.float16)
        h = np.where(np.isinf(h), np.copysign(np.float16(65504), x.astype(f32)).astype(np.float16), h)
        return h.view(np.uint16)
    u = x.view(np.uint32).astype(np.uint64)
    r = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint32)
    r = np.where((r & 0x7FFF) >= 0x7F80, (r & 0x8000) | 0x7F7F, r)
    return r.astype(np.uint16)


def to_half(x):
    with np.errstate(over="ignore"):
        return np.asarray(x, f32).astype(np.float16)


def half(bits):
    return np.asarray(bits, np.uint16).view(np.float16).astype(f32)


def rotation(d):
    return min(d & -d, 256)


def rotate(x, r):
    x = np.array(x, f32).reshape(-1, r)
    h = 1
    while h < r:
        y = x.reshape(x.shape[0], r // (2 * h), 2, h)
        a, b = y[:, :, 0].copy(), y[:, :, 1].copy()
        y[:, :, 0], y[:, :, 1] = a + b, a - b
        h *= 2
    return x.reshape(-1)


def pad16(b):
    return bytes(b) + bytes(-len(b) % 16)


def pack(c, tier):
    d = len(c)
    c = c.astype(np.uint8)
    if tier in (P8, Q8):
        return c.tobytes()
    if tier in (Q4, P4):
        return (c[: d // 2] | c[d // 2:] << 4).astype(np.uint8).tobytes()
    q = d // 4
    low = c & 3
    out = (low[:q] | low[q:2 * q] << 2 | low[2 * q:3 * q] << 4 | low[3 * q:] << 6).astype(np.uint8).tobytes()
    if tier == Q3:
        e = d // 8
        high = np.zeros(e, np.uint8)
        for j in range(8):
            high |= ((c[j * e:(j + 1) * e] >> 2) << j).astype(np.uint8)
        out += high.tobytes()
    return out


def unpack(b, d, tier):
    b = np.frombuffer(b, np.uint8)
    if tier in (P8, Q8):
        return b.view(np.int8).astype(np.int32)
    if tier in (Q4, P4):
        return np.concatenate([b & 15, b >> 4]).astype(np.int32)
    q = d // 4
    c = np.concatenate([(b[:q] >> s) & 3 for s in (0, 2, 4, 6)]).astype(np.int32)
    if tier == Q3:
        high = b[q:]
        c |= np.concatenate([(high >> j) & 1 for j in range(8)]).astype(np.int32) << 2
    return c


def cell_bytes(tier, d, dtype):
    return {RAW: d * (4 if dtype == F32 else 2), Q8: d, P8: d, Q4: d // 2, P4: d // 2, Q3: d // 4 + d // 8, Q2: d // 4}[tier]


def absmax(x, top):
    s = to_half(np.abs(x).max() / f32(top)).astype(f32)
    if s == 0:
        return s, np.zeros(len(x), np.int32)
    c = np.clip(np.rint(x * (f32(1) / s)), -top, top).astype(np.int32)
    return s, c


def rotated8(z, r):
    s = to_half(np.abs(z).max() / f32(127) / f32(r) * f32(64)).astype(f32)
    if s == 0:
        return s, np.zeros(len(z), np.int32)
    g = s / f32(64) * f32(r)
    return s, np.clip(np.rint(z * (f32(1) / g)), -127, 127).astype(np.int32)


def rotated(z, r, bits):
    t = np.abs(z).max() * step(bits, len(z))
    e = (int(to_half(t / f32(r) * f32(64)).view(np.uint16)) + 64) >> 7
    assert e < 0xF8
    top = 1 << (bits - 1)
    if e == 0:
        return 0, np.full(len(z), top, np.int32)
    g = half(e << 7) / f32(64) * f32(r)
    c = np.clip(np.floor(z * (f32(1) / g)) + top, 0, 2 * top - 1).astype(np.int32)
    return e, c


def centres(x, tier):
    """x [T,H,D] float32, tier [T] after the first escapes -> scales [G,H], codes [G,H,D], means [G,H,D]."""
    t, h, d = x.shape
    groups = -(-t // 64)
    scale = np.zeros((groups, h), np.float16)
    code = np.zeros((groups, h, d), np.int8)
    for g in range(groups):
        for j in range(h):
            total, n = np.zeros(d, f32), 0
            for i in range(64 * g, min(64 * g + 64, t)):
                if tier[i] in ROTATED:
                    total, n = total + x[i, j], n + 1
            if not n:
                continue
            mean = total / f32(n)
            s, c = absmax(mean, 127)
            scale[g, j], code[g, j] = s, c
    return scale, code, code.astype(f32) * scale.astype(f32)[:, :, None]


def encode(k, v, tiers_k, tiers_v, dtype=F16, fence=0, chunk_index=0, group=0, layer=0, token_first=0, head_first=0):
    t, h, d = k.shape
    r = rotation(d)
    planes = [(k, np.array(tiers_k, np.uint8))] + ([(v, np.array(tiers_v, np.uint8))] if v is not None else [])
    wide = [widen(w, dtype) for w, _ in planes]
    for (_, tier), x in zip(planes, wide):
        finite = np.isfinite(x).all((1, 2))
        top = np.where(np.isfinite(x), np.abs(x), 0).max((1, 2))
        tier[~finite | (top > np.where(np.isin(tier, ROTATED), LIMIT_ROTATED, LIMIT_PLAIN))] = RAW
    c_scale, c_code, c_mean = centres(np.where(np.isfinite(wide[0]), wide[0], 0), planes[0][1])
    scales8, scales16, codes = bytearray(), bytearray(), {x: bytearray() for x in CODE_ORDER}
    for p, ((words, tier), x) in enumerate(zip(planes, wide)):
        for i in range(t):
            kind = int(tier[i])
            cells = []
            for j in range(h):
                if kind in PLAIN:
                    cells.append(absmax(x[i, j], PLAIN[kind]))
                elif kind in ROTATED:
                    z = rotate(x[i, j] - c_mean[i // 64, j] if p == 0 else x[i, j], r)
                    cells.append(rotated8(z, r) if kind == Q8 else rotated(z, r, STEPPED[kind]))
            if kind == RAW:
                codes[RAW] += words[i].tobytes()
                continue
            for scale, code in cells:
                if kind in STEPPED:
                    scales8.append(scale)
                else:
                    scales16 += scale.astype(np.float16).tobytes()
                codes[kind] += pack(code + 8 if kind == P4 else code, kind)
    tier_map = planes[0][1] | (planes[1][1] << 4 if v is not None else 0)
    body = pad16(tier_map.astype(np.uint8).tobytes())
    if np.isin(planes[0][1], ROTATED).any():
        body += pad16(c_scale.tobytes()) + pad16(c_code.tobytes())
    body += pad16(scales8) + pad16(scales16) + b"".join(pad16(codes[x]) for x in CODE_ORDER)
    head = struct.pack("<4sHHQIHHIHBBHHHHIH14x", b"SKV1", 1, 64, fence, chunk_index, group, layer, token_first, t, dtype,
                       int(v is not None), h, d, r, 64, len(body), head_first)
    return head + struct.pack("<I", crc32c(head + body)) + body


def decode(chunk):
    if len(chunk) < 64:
        raise Refused("TRUNCATED")
    (magic, version, hb, fence, index, group, layer, first, t, dtype, flags, h, d, r, ct, bb, head_first, reserved, crc) = struct.unpack(
        "<4sHHQIHHIHBBHHHHIH14sI", chunk[:64])
    if magic != b"SKV1":
        raise Refused("BAD_MAGIC")
    if version != 1 or hb != 64:
        raise Refused("UNSUPPORTED_VERSION")
    if (any(reserved) or flags > 1 or dtype not in (1, 2, 3) or not 1 <= t <= 4096 or not 1 <= h <= 1024 or d % 8 or not 8 <= d <= 1024
            or r != rotation(d) or ct != 64):
        raise Refused("BAD_HEADER")
    body = chunk[64:]
    if len(body) != bb:
        raise Refused("BAD_LENGTH")
    if crc32c(chunk[:60] + body) != crc:
        raise Refused("BAD_CHECKSUM")
    at = 0

    def take(n):
        nonlocal at
        part, rest = body[at:at + n], body[at + n:at + n + -n % 16]
        if any(rest):
            raise Refused("BAD_PADDING")
        at += n + -n % 16
        return part

    up = lambda n: n + -n % 16
    if len(body) < up(t):
        raise Refused("BAD_LENGTH")
    tier_map = np.frombuffer(body[:t], np.uint8)
    tiers = [tier_map & 15] + ([tier_map >> 4] if flags & 1 else [])
    if (tier_map & 15).max() > 6 or (tier_map >> 4).max() > (6 if flags & 1 else 0):
        raise Refused("BAD_TIER")
    count = {x: h * sum(int((p == x).sum()) for p in tiers) for x in CODE_ORDER}
    runs = -(-t // 64) if np.isin(tiers[0], ROTATED).any() else 0
    sizes = [t, 2 * runs * h, runs * h * d, sum(count[x] for x in STEPPED), 2 * (count[Q8] + count[P8] + count[P4])]
    sizes += [count[x] * cell_bytes(x, d, dtype) for x in CODE_ORDER]
    if len(body) != sum(map(up, sizes)):
        raise Refused("BAD_LENGTH")
    take(t)
    mean = np.zeros((-(-t // 64), h, d), f32)
    if runs:
        scale = np.frombuffer(take(2 * mean.shape[0] * h), np.float16).reshape(-1, h)
        if not np.isfinite(scale).all():
            raise Refused("BAD_SCALE")
        mean = np.frombuffer(take(mean.size), np.int8).reshape(mean.shape).astype(f32) * scale.astype(f32)[:, :, None]
    s8 = take(sum(count[x] for x in STEPPED))
    if any(x >= 0xF8 for x in s8):
        raise Refused("BAD_SCALE")
    s16 = np.frombuffer(take(2 * (count[Q8] + count[P8] + count[P4])), np.float16)
    if not np.isfinite(s16).all():
        raise Refused("BAD_SCALE")
    code = {x: take(count[x] * cell_bytes(x, d, dtype)) for x in CODE_ORDER}
    used, n8, n16 = {x: 0 for x in CODE_ORDER}, 0, 0
    word = np.uint32 if dtype == F32 else np.uint16
    out = []
    for p, tier in enumerate(tiers):
        plane = np.empty((t, h, d), word)
        for i in range(t):
            for j in range(h):
                kind = int(tier[i])
                size = cell_bytes(kind, d, dtype)
                part = code[kind][used[kind] * size:(used[kind] + 1) * size]
                used[kind] += 1
                if kind == RAW:
                    plane[i, j] = np.frombuffer(part, word)
                elif kind in PLAIN:
                    c = unpack(part, d, kind) - (8 if kind == P4 else 0)
                    plane[i, j] = narrow(c.astype(f32) * s16[n16].astype(f32), dtype)
                    n16 += 1
                else:
                    if kind == Q8:
                        w = unpack(part, d, kind).astype(f32) * (s16[n16].astype(f32) / f32(64))
                        n16 += 1
                    else:
                        w = (unpack(part, d, kind).astype(f32) - f32((1 << (STEPPED[kind] - 1)) - 0.5)) * (half(s8[n8] << 7) / f32(64))
                        n8 += 1
                    x = rotate(w, r)
                    plane[i, j] = narrow(x + mean[i // 64, j] if p == 0 else x, dtype)   # V: no +0, so -0 stays
        out.append(plane)
    header = dict(fence=fence, chunk_index=index, group=group, layer=layer, token_first=first, head_first=head_first, dtype=dtype)
    return header, out[0], (out[1] if flags & 1 else None), tiers[0], (tiers[1] if flags & 1 else None)
