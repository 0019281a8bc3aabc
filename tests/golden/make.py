# Regenerates tests/golden/vectors with numpy: python3 tests/golden/make.py. The format is frozen: a change of any vector
# is a change of the wire format.
"""Writes vectors/ : NAME.in (K then V words), NAME.tiers (requested, tier map bytes), NAME.chunk, NAME.out, and must_fail/*.chunk, with index.json."""
import json, os
import numpy as np
import reference as R

here = os.path.dirname(os.path.abspath(__file__))
out = os.path.join(here, "vectors")
os.makedirs(out + "/must_fail", exist_ok=True)
index = {"cases": [], "must_fail": []}
rng = np.random.default_rng(20260608)


def words(x, dtype):
    return R.narrow(x.astype(np.float32), dtype)


def case(name, t, h, d, dtype, tiers, special=None, v_present=True, scale=1.0, tiers_v=None):
    k = (rng.normal(size=(t, h, d)) * 2 + rng.normal(size=(1, h, d)) * 4) * scale
    k[..., 3 % d] *= 12                                     # a channel outlier, as real keys have
    v = rng.normal(size=(t, h, d)) * scale
    k, v = words(k, dtype), words(v, dtype)
    if special:
        special(k, v)
    tk = rng.choice(tiers, size=t).astype(np.uint8)
    tv = rng.choice(tiers_v or tiers, size=t).astype(np.uint8)
    head = dict(fence=0x0123456789ABCDEF, chunk_index=7, group=1, layer=29, token_first=512, head_first=16)
    chunk = R.encode(k, v if v_present else None, tk, tv, dtype, **head)
    got = R.decode(chunk)
    open(f"{out}/{name}.in", "wb").write(k.tobytes() + (v.tobytes() if v_present else b""))
    open(f"{out}/{name}.tiers", "wb").write((tk | (tv << 4 if v_present else 0)).astype(np.uint8).tobytes())
    open(f"{out}/{name}.chunk", "wb").write(chunk)
    open(f"{out}/{name}.out", "wb").write(got[1].tobytes() + (got[2].tobytes() if v_present else b""))
    escaped = int((got[3] != tk).sum() + ((got[4] != tv).sum() if v_present else 0))
    index["cases"].append(dict(name=name, tokens=t, heads=h, head_dim=d, dtype=dtype, v_present=v_present, escaped_tokens=escaped, **head))
    return chunk


ALL = [R.RAW, R.P8, R.Q8, R.Q4, R.Q3, R.Q2, R.P4]
for tier, label in zip(ALL, ("raw", "p8", "q8", "q4", "q3", "q2", "p4")):
    case(f"only_{label}", 17, 2, 64, R.F16, [tier])
for dtype, label in ((R.F16, "f16"), (R.BF16, "bf16"), (R.F32, "f32")):
    for d in (8, 64, 80, 96, 128, 192, 256):
        case(f"mix_{label}_d{d}", 13, 3, d, dtype, ALL)
for t in (1, 2, 63, 64, 65, 128, 130):
    case(f"tokens_{t}", t, 2, 64, R.F16, [R.Q4, R.Q3, R.Q8, R.P8])
for h in (1, 5, 8, 33):
    case(f"heads_{h}", 5, h, 64, R.BF16, ALL)
case("mla_latent_576", 9, 1, 576, R.BF16, ALL, v_present=False)
case("tiny_values", 20, 2, 64, R.F16, ALL, scale=1e-6)
case("large_values", 20, 2, 64, R.F16, ALL, scale=4000)
case("bf16_huge", 20, 2, 64, R.BF16, ALL, scale=1e30)
case("bf16_tiny", 20, 2, 64, R.BF16, ALL, scale=1e-30)


def nonfinite(k, v):
    k[1, 0, 5], k[2, 1, 0], v[3, 0, 1], v[4, 1, 63] = 0x7C00, 0x7E01, 0xFC00, 0xFFFF


def zeros(k, v):
    k[:6], v[:6] = 0, 0
    k[7], v[7] = 0x8000, 0x8000
    k[8], v[8] = 1, 0x83FF


case("nonfinite", 20, 2, 64, R.F16, ALL, nonfinite)
case("zeros_and_subnormals", 20, 2, 64, R.F16, ALL, zeros)
case("small_integers", 40, 3, 64, R.F16, ALL, lambda k, v: (k.__setitem__(slice(None), words(rng.integers(-3, 4, k.shape), R.F16)), v.__setitem__(slice(None), words(rng.integers(-2, 3, v.shape), R.F16))))


def small(k, v):
    for x in (k, v):
        x[:] = words(rng.integers(-60, 61, x.shape) / rng.choice([1, 2, 4, 8], size=x.shape[:1] + (1, 1)), R.F16)


for tier, label in ((R.P8, "p8"), (R.P4, "p4"), (R.Q8, "q8"), (R.Q4, "q4"), (R.Q3, "q3"), (R.Q2, "q2")):
    case(f"arithmetic_{label}", 512, 2, 16, R.F16, [tier], small)
case("only_v_rotated", 70, 2, 64, R.F16, [R.RAW, R.P8, R.P4], tiers_v=[R.Q8, R.Q4, R.Q3, R.Q2])
case("only_k_rotated", 70, 2, 64, R.F16, [R.Q8, R.Q4, R.Q3, R.Q2], tiers_v=[R.RAW, R.P8])
case("head_dim_136", 12, 2, 136, R.F16, ALL)


def limits(k, v):
    big = np.array([1023.5, 1024, 1024.5, 65503, 65504, 65510, 65519, 65520, 1e9], np.float32)
    for i, x in enumerate(big):
        k[2 * i, 0, 4] = v[2 * i + 1, 1, 60] = x.view(np.uint32)


for label, only in (("rotated", [R.Q8, R.Q4, R.Q3, R.Q2]), ("plain", [R.P8, R.P4])):
    case(f"limits_{label}", 19, 2, 64, R.F32, only, limits)
case("constant_keys", 66, 2, 64, R.F16, [R.Q4, R.Q2], lambda k, v: k.__setitem__(slice(None), k[:1].copy()))

good = case("victim", 66, 2, 64, R.F16, ALL)


def decode_only(name, change):
    """Valid chunks no encoder of ours writes: only the decoded words are compared."""
    b = bytearray(good)
    change(b)
    b[60:64] = R.crc32c(bytes(b[:60]) + bytes(b[64:])).to_bytes(4, "little")
    got = R.decode(bytes(b))
    open(f"{out}/{name}.chunk", "wb").write(bytes(b))
    open(f"{out}/{name}.out", "wb").write(got[1].tobytes() + got[2].tobytes())
    index["decode_only"].append(dict(name=name, tokens=66, heads=2, head_dim=64, dtype=R.F16, v_present=True))


def layout(chunk):
    """Offsets of the sections of a chunk."""
    t, h, d = 66, 2, 64
    tm = np.frombuffer(chunk[64:64 + t], np.uint8)
    n = {x: h * int((tm & 15 == x).sum() + (tm >> 4 == x).sum()) for x in R.CODE_ORDER}
    sizes = dict(map=t, cs=2 * 2 * h, cc=2 * h * d, s8=sum(n[x] for x in R.STEPPED), s16=2 * (n[R.Q8] + n[R.P8] + n[R.P4]))
    sizes.update({f"c{x}": n[x] * R.cell_bytes(x, d, R.F16) for x in R.CODE_ORDER})
    at, place = 64, {}
    for k, v in sizes.items():
        place[k] = (at, v)
        at += v + -v % 16
    assert at == len(chunk)
    return place


P = layout(good)


def fill(section, value):
    def change(b):
        at, n = P[section]
        b[at:at + n] = bytes([value]) * n
    return change


index["decode_only"] = []
decode_only("any_codes_ff", lambda b: [fill(f"c{x}", 0xFF)(b) for x in (R.Q8, R.P8, R.P4, R.Q4, R.Q3, R.Q2)])
decode_only("any_codes_80", lambda b: [fill(f"c{x}", 0x80)(b) for x in (R.Q8, R.P8, R.P4, R.Q4, R.Q3, R.Q2)])
decode_only("any_codes_00", lambda b: [fill(f"c{x}", 0x00)(b) for x in (R.Q8, R.P8, R.P4, R.Q4, R.Q3, R.Q2)])
decode_only("scale_bytes_zero", lambda b: (fill("s8", 0)(b), fill("c2", 0)(b)))
decode_only("scale_bytes_largest", fill("s8", 0xF7))
decode_only("scale_bytes_subnormal", fill("s8", 0x03))
decode_only("scales16_negative", fill("s16", 0xBC))
decode_only("centre_codes_80", fill("cc", 0x80))


def fail(name, reason, change, fix_crc=True):
    b = bytearray(good)
    b = change(b) or b
    if fix_crc and len(b) >= 64:
        b[60:64] = R.crc32c(bytes(b[:60]) + bytes(b[64:])).to_bytes(4, "little")
    try:
        R.decode(bytes(b))
    except R.Refused as e:
        assert str(e) == reason, (name, str(e), reason)
    else:
        raise AssertionError(name)
    open(f"{out}/must_fail/{name}.chunk", "wb").write(bytes(b))
    index["must_fail"].append(dict(name=name, reason=reason))


def put(at, *values):
    def change(b):
        b[at:at + len(values)] = bytes(values)
    return change


body_tiers = 66
fail("truncated_header", "TRUNCATED", lambda b: b[:63])
fail("magic", "BAD_MAGIC", put(0, 0x58))
fail("version", "UNSUPPORTED_VERSION", put(4, 2))
fail("header_bytes", "UNSUPPORTED_VERSION", put(6, 72))
fail("no_tokens", "BAD_HEADER", put(28, 0, 0))
fail("too_many_tokens", "BAD_HEADER", put(28, 1, 0x10))
fail("dtype_zero", "BAD_HEADER", put(30, 0))
fail("unknown_flag", "BAD_HEADER", put(31, 3))
fail("no_heads", "BAD_HEADER", put(32, 0, 0))
fail("head_dim_odd", "BAD_HEADER", put(34, 63))
fail("rotation_wrong", "BAD_HEADER", put(36, 32))
fail("centre_wrong", "BAD_HEADER", put(38, 32))
fail("reserved_set", "BAD_HEADER", put(50, 1))
fail("body_short", "BAD_LENGTH", lambda b: b[:-16])
fail("body_long", "BAD_LENGTH", lambda b: b + bytes(16))
fail("tokens_do_not_fit", "BAD_LENGTH", put(28, 67))
def cut_body(size, tokens):
    def change(b):
        b = b[:64 + size]
        b[28:30] = tokens.to_bytes(2, "little")
        b[40:44] = size.to_bytes(4, "little")
        return b
    return change


fail("tokens_beyond_body", "BAD_LENGTH", cut_body(4000, 4096))
fail("tier_map_padding_missing", "BAD_LENGTH", cut_body(70, 67))
fail("v_tier_7", "BAD_TIER", put(64, 0x70))
fail("reserved_first", "BAD_HEADER", put(46, 1))
fail("reserved_last", "BAD_HEADER", put(59, 1))
fail("dtype_4", "BAD_HEADER", put(30, 4))
fail("too_many_heads", "BAD_HEADER", put(32, 1, 4))
fail("head_dim_too_large", "BAD_HEADER", put(34, 8, 4))
fail("unknown_k_tier", "BAD_TIER", put(64, 0x07))
fail("unknown_v_tier", "BAD_TIER", put(64, 0xF0))
fail("v_tier_without_v", "BAD_TIER", put(31, 0))
fail("padding_set", "BAD_PADDING", put(64 + body_tiers + 1, 1))
fail("scale_byte_too_large", "BAD_SCALE", put(P["s8"][0] + 1, 0xF8))
fail("scale16_infinite", "BAD_SCALE", put(P["s16"][0], 0x00, 0x7C))
for name in ("s8", "s16", "c4"):
    at, n = P[name]
    if n % 16:
        fail(f"padding_set_after_{name}", "BAD_PADDING", put(at + n, 1))
fail("padding_before_scale", "BAD_PADDING", lambda b: (put(64 + body_tiers, 1)(b), put(P["s8"][0], 0xF9)(b))[0])
fail("tier_before_padding", "BAD_TIER", lambda b: (put(64 + body_tiers, 1)(b), put(64, 0x0F)(b))[0])
fail("magic_before_version", "BAD_MAGIC", lambda b: (put(0, 0x58)(b), put(4, 9)(b))[0])
fail("centre_scale_nan", "BAD_SCALE", put(64 + 80, 0x00, 0x7E))
fail("flipped_bit", "BAD_CHECKSUM", put(len(good) - 40, good[len(good) - 40] ^ 1), fix_crc=False)
fail("fence_flipped", "BAD_CHECKSUM", put(8, good[8] ^ 1), fix_crc=False)
json.dump(index, open(f"{out}/index.json", "w"), indent=1)
print(len(index["cases"]), "cases,", len(index["decode_only"]), "decode only,", len(index["must_fail"]), "must fail")
