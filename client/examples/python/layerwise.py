"""Sends a KV cache while it is being computed: every layer travels as soon as it is written.

python layerwise.py PREFILL_SOCKET DECODE_SOCKET DECODE_PEER   (scripts/demo --keep prints addresses that serve)
"""

import sys
import threading

import numpy as np

import spectrumkv as skv

LAYERS, TOKENS, HEADS, HEAD_DIM = 12, 500, 4, 64


def main(prefill_socket: str, decode_socket: str, peer: str) -> None:
    source = skv.Group(layers=range(LAYERS), heads=HEADS, head_dim=HEAD_DIM, block_tokens=16, num_blocks=64)
    target = skv.Group(layers=range(LAYERS), heads=HEADS, head_dim=HEAD_DIM, block_tokens=64, num_blocks=16, fused=True)
    with (
        skv.Client(prefill_socket) as prefill,
        skv.Client(decode_socket) as decode,
        prefill.shared_memory_pool([source], model="example") as cache,
        decode.shared_memory_pool([target], model="example") as other_cache,
    ):
        blocks, other_blocks = list(range(40, 8, -1)), [3, 14, 1, 5, 9, 2, 6, 15]
        decode.expect("example", pool=other_cache, token_count=TOKENS, blocks=other_blocks)
        prefill.send("example", peer=peer, pool=cache, token_count=TOKENS, blocks=blocks, layerwise=True,
                     policy=skv.policy(budget=0.3, importance="POSITION"))  # fmt: skip
        arrived = [threading.Event() for _ in range(LAYERS)]

        def layers_ready(count: int) -> None:
            for event in arrived[:count]:
                event.set()
            print(f"decode worker: {count} layers are ready")

        waiter = threading.Thread(
            target=decode.wait, args=["example"], kwargs={"on_layers_ready": layers_ready, "timeout_s": 30}
        )
        waiter.start()
        computed = np.random.default_rng(0).normal(size=(LAYERS, 2, TOKENS, HEADS, HEAD_DIM)).astype(np.float16)
        for layer in range(LAYERS):
            for place, block in enumerate(blocks):
                for view, plane in ((cache.k(layer), 0), (cache.v(layer), 1)):
                    part = computed[layer, plane, place * 16 : (place + 1) * 16]
                    view[block, : len(part)] = part
            prefill.advance("example", layers=layer + 1, tokens=TOKENS)
            # Only to show that a layer travels before the next one exists; a real worker just goes on.
            if not arrived[layer].wait(timeout=30):
                sys.exit(f"layer {layer} did not arrive")
        report = prefill.wait("example", timeout_s=30)
        waiter.join()
        landed = other_cache.read_tokens(TOKENS, other_blocks).astype(np.float32)
        error = np.sqrt(((landed - computed) ** 2).sum() / (computed.astype(np.float32) ** 2).sum())
        print(f"{report.wire_bytes} of {report.kv_bytes} bytes travelled; relative error {error:.4f}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
