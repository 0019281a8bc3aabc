"""A model for tests of probes, whose cache is the text itself: what it says depends on what the codec did to the KV, and on nothing else."""

import numpy as np

DIM = 32
BLOCK_TOKENS = 64
_SIGNS = np.where(np.random.default_rng(3).random(DIM) < 0.5, -1, 1).astype(np.float32)


class TextInKv:
    """One token for each character. robust: its bits, each in four places, which two bits of precision preserve; else its number,
    which only eight bits do."""

    def __init__(self, robust):
        self.robust = robust
        self.exact = []

    def prefill(self, text):
        codes = np.frombuffer(text.encode("ascii"), np.uint8)
        if self.robust:
            bits = np.unpackbits(codes[:, None], axis=1).astype(np.float32) * 2 - 1
            values = np.tile(bits, DIM // 8)
        else:
            values = np.repeat(codes[:, None].astype(np.float32) / 128, DIM, axis=1)
        kv = np.broadcast_to((values * _SIGNS)[None, None, :, None, :], (2, 2, len(codes), 1, DIM))
        return kv.astype(np.float16)

    def read(self, kv):
        values = kv[0, 1, :, 0].astype(np.float32) * _SIGNS
        if self.robust:
            bits = values.reshape(len(values), DIM // 8, 8).mean(axis=1) > 0
            codes = np.packbits(bits, axis=1)[:, 0]
        else:
            codes = np.clip(np.rint(values.mean(axis=1) * 128), 0, 127).astype(np.uint8)
        return codes.tobytes().decode("ascii", "replace")

    def answer(self, kv, text, characters):
        name = text.rsplit(" is", 1)[0].rsplit("the passkey of ", 1)[-1].rsplit("The passkey of ", 1)[-1]
        _, found, after = self.read(kv).partition(f"passkey of {name} is ")
        return after[:characters] if found else "I do not know"

    def next_tokens(self, kv, text):
        prompt = self.read(kv)
        return [ord(prompt[(7 * i) % len(prompt)]) + ord(letter) for i, letter in enumerate(text)]
