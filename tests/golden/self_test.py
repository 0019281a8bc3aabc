"""Prints the checksums embedded in kernels/codec/self_test.cc, computed by reference.py: python3 tests/golden/self_test.py"""
import numpy as np
import reference as R

f32 = np.float32
T, H = 67, 2


def words(dtype, d):
    n, x, out = 2 * T * H * d, 2026, []
    for _ in range(n):
        x = (x * 1664525 + 1013904223) & 0xFFFFFFFF
        r = x >> 8
        sign, step = r >> 23 & 1, (r >> 20 & 7) % 6
        if dtype == R.F16:
            out.append(sign << 15 | (12 + step) << 10 | r & 0x3FF)
        elif dtype == R.BF16:
            out.append(sign << 15 | (124 + step) << 7 | r & 0x7F)
        else:
            out.append(sign << 31 | (124 + step) << 23 | (r & 0xFFFFF) << 3)
    out = np.array(out, np.uint32 if dtype == R.F32 else np.uint16).reshape(2, T, H, d)
    if dtype == R.F32:
        out[0, 9, 1, 3] = 0x7FC00001      # escapes: NaN; above 1024; above 65504
        out[1, 11, 0, 5] = 0x44800001
        out[1, 5, 1, 7] = 0xC7800000
    return out


def energy(x):
    """Order and quantising of kernels/codec/scan_math.h."""
    lanes = np.zeros(64, f32)
    for head in x:
        for d, value in enumerate(head):
            lanes[d % 64] = lanes[d % 64] + value * value
    width = 32
    while width:
        lanes[:width] = lanes[:width] + lanes[width:2 * width]
        width //= 2
    return lanes[0]


def scan(plane, dtype):
    out = bytearray()
    for token in R.widen(plane.reshape(-1), dtype).reshape(plane.shape):
        if not np.isfinite(token).all():
            out += bytes([3, 255])
            continue
        top = np.abs(token).max()
        s = energy(token)
        q = 0 if s == 0 else int(np.clip(128 + np.round(4 * np.log2(np.float64(s))), 1, 255))
        out += bytes([2 if top > 65504 else 1 if top > 1024 else 0, q])
    return bytes(out)


def spread(plane, dtype, centred, skip):
    """The definition of scan_math.h: a sample of the values, around the mean of each run of 64 tokens."""
    x = R.widen(plane.reshape(-1), dtype).reshape(plane.shape)
    tokens, heads, dim = x.shape
    values = heads * dim
    parts = 4 if values >= 256 else 2 if values > 128 else 1
    dims = min(max((dim // parts + 15) // 16 * 16, 32), dim)
    step = max(heads * dims // (64 if centred or values < 512 else 32), 1)
    places = dim // dims
    pieces = [x[:, h, i % places * dims:(i % places + 1) * dims] for i, h in enumerate(range(0, heads, step))]
    x = np.stack(pieces, axis=1)
    out = bytearray()
    for first in range(0, tokens, 64):
        run = x[first:first + 64]
        mean = np.zeros(run.shape[1:], f32)
        used = 0
        for t, token in enumerate(run):
            if centred and first + t >= skip and (np.abs(token) <= 1024).all():
                mean = mean + token
                used += 1
        if used:
            mean = mean / f32(used)
        for token in run:
            s = energy(token - mean if centred else token)
            finite = np.isfinite(s)
            out.append(255 if not finite else 0 if s == 0 else int(np.clip(128 + np.round(4 * np.log2(np.float64(s))), 1, 255)))
    return bytes(out)


def wide(plane):
    return plane.reshape(-1)[:16 * 8 * plane.shape[-1]].reshape(16, 8, plane.shape[-1])


def fma(a, b, c):
    """a * b + c of float32, rounded once: the product is exact in float64, the sum is rounded to odd there."""
    product = a.astype(np.float64) * np.float64(b) if np.ndim(a) else np.float64(a) * b
    c = np.float64(c)
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    bits = np.asarray(total).view(np.int64)
    even = (lost != 0) & (bits & 1 == 0)
    away = (lost > 0) == (np.asarray(total) > 0)
    return np.where(even, np.where(away, bits + 1, bits - 1), bits).view(np.float64).astype(f32)


def exp_of(x):
    """ExpOf of kernels/codec/attend_math.h."""
    shifted = fma(x, f32(1.44269504), f32(12582912.0))
    n = shifted - f32(12582912.0)
    r = fma(n, f32(2.12194440e-4), fma(n, f32(-0.693359375), x))
    p = np.full_like(r, f32(1.9875691500e-4))
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, f32(term))
    p = fma(p, r * r, r) + f32(1)
    scaled = (p.view(np.uint32) + (shifted.view(np.uint32) << np.uint32(23))).view(f32)
    return np.where(x >= f32(-87), scaled, f32(0))


def attend(plane, dtype, window, cap):
    """The definition of attend_math.h, head 1: six queries, the keys of tokens 3, 14, ..., 58 eighth and turned round, at the
    positions of those tokens plus 5."""
    keys = R.widen(plane.reshape(-1), dtype).reshape(plane.shape)[:, 1]
    hidden = f32(-3e38)
    scores, tops, sums, weights = np.zeros(T, f32), [], [], []
    for i in range(6):
        query, position = keys[3 + 11 * i][::-1] * f32(0.125), 8 + 11 * i
        dot = np.zeros(T, f32)
        for d in range(len(query)):
            dot = fma(keys[:, d], query[d], dot)
        logit = dot
        if cap:
            e = exp_of(np.abs(dot) * (f32(1) / f32(cap)) * f32(-2))
            logit = np.copysign(f32(cap) * ((f32(1) - e) / (f32(1) + e)), dot)
        t = np.arange(T)
        seen = (t <= position) & ((t > position - window) if window else True) & (np.abs(dot) <= f32(1e6))
        logit = np.concatenate([np.where(seen, logit, hidden), np.full(-T % 64, hidden)]).reshape(-1, 64)
        tops.append(logit.max(axis=1))
        weights.append(np.where(logit == hidden, f32(0), exp_of(logit - tops[-1][:, None])))
        fold = weights[-1]
        while fold.shape[1] > 1:
            half = fold.shape[1] // 2
            fold = fold[:, :half] + fold[:, half:]
        sums.append(fold[:, 0])
    for top, block_sums, block_weights in zip(tops, sums, weights):
        share, total = exp_of(top - top.max()), f32(0)
        for b in range(len(top)):
            if top[b] != hidden:
                total = fma(block_sums[b], share[b], total)
        for b in range(len(top)):
            if top[b] == hidden or share[b] / total == 0:
                continue
            part = slice(64 * b, min(64 * b + 64, T))
            scores[part] = fma(block_weights[b][:part.stop - part.start], share[b] / total, scores[part])
    return scores.tobytes()


for dtype, d in ((R.F16, 128), (R.BF16, 64), (R.F32, 80)):
    with np.errstate(invalid="ignore", over="ignore"):
        k, v = words(dtype, d)
        tiers = np.arange(T)
        chunk = R.encode(k, v, tiers % 7, tiers // 7 % 7, dtype, fence=0x5EC7, chunk_index=3, group=1, layer=2, token_first=64, head_first=4)
        _, dk, dv, _, _ = R.decode(chunk)
        print(f"    {{{d}, DType({dtype}), {len(chunk)}, 0x{R.crc32c(chunk[64:]):08X}, 0x{R.crc32c(dk.tobytes() + dv.tobytes()):08X}, "
              f"0x{R.crc32c(scan(k, dtype) + scan(v, dtype)):08X}, "
              f"0x{R.crc32c(spread(k, dtype, True, 3) + spread(v, dtype, False, 0) + spread(wide(v), dtype, False, 0)):08X}, "
              f"0x{R.crc32c(attend(k, dtype, 0, 0) + attend(k, dtype, 20, 2.5)):08X}}},")
