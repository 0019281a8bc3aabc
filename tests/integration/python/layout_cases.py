"""The table of layouts: what lies where on both sides, and how it is sent."""

from dataclasses import dataclass, field

import spectrumkv as skv

# What two sides of a case may differ in.
NHD, HND = {"layout": "NHD"}, {"layout": "HND"}
FUSED_NHD, FUSED_HND = {"layout": "NHD", "fused": True}, {"layout": "HND", "fused": True}
ONE_TENSOR = {"axes": "BLPTHD"}  # all layers of a block side by side
INTERLEAVED = {"axes": "LBTHPD"}  # K and V of a head side by side
TOKEN_PAIRS = {"axes": "LBTPHD"}  # K and V of a token side by side
DIM_OUTSIDE = {"axes": "LPBHDT"}  # transposed keys: values of one token are not contiguous


@dataclass(frozen=True)
class Layout:
    """heads, head_dim and layers are common; `source` and `target` are what the sides have of their own."""

    name: str
    source: dict
    target: dict
    heads: int = 2
    head_dim: int = 64
    layers: tuple = (0, 1)
    tokens: int = 21
    dtypes: tuple = ("float16", "float16")
    block_tokens: tuple = (8, 8)
    memory: tuple = ("shm", "shm")
    pull: bool = False
    policy: str = "raw"
    extra_blocks: int = 0
    skip: tuple = (0, 0)  # tokens of the first block that are not of the transfer
    group: dict = field(default_factory=dict)

    def groups(self, side):
        """The groups of side 0 (source) or 1 (target)."""
        size = self.block_tokens[side]
        needed = -(-(self.skip[side] + self.tokens) // size) + self.extra_blocks
        own = (self.source, self.target)[side]
        return [
            skv.Group(
                layers=self.layers, heads=self.heads, head_dim=self.head_dim, block_tokens=size,
                num_blocks=needed + 3 + 2 * side, dtype=self.dtypes[side], **own, **self.group,
            )  # fmt: skip
        ]


def _pairs():
    """Every kind of memory order against every other and itself."""
    kinds = dict(nhd=NHD, hnd=HND, fused_nhd=FUSED_NHD, fused_hnd=FUSED_HND, one_tensor=ONE_TENSOR,
                 interleaved=INTERLEAVED, token_pairs=TOKEN_PAIRS, dim_outside=DIM_OUTSIDE)  # fmt: skip
    for i, here in enumerate(kinds):
        for j, there in enumerate(kinds):
            policy = ("raw", "mixed")[(i + j) % 2]
            yield Layout(f"{here}_to_{there}", kinds[here], kinds[there], policy=policy, pull=(i + 2 * j) % 3 == 0)


def _prefixes():
    """What the receiver has ends anywhere in a block, at other places on the two sides."""
    for here, there in ((8, 8), (16, 5), (4, 32), (1, 8)):
        for skips in ((here - 1, 0), (0, there - 1), (here // 2, there // 3), (here - 1, there - 1)):
            policy = ("raw", "mixed")[(here + skips[0]) % 2]
            yield Layout(f"prefix{skips[0]}of{here}to{skips[1]}of{there}", NHD, FUSED_HND, head_dim=32, tokens=45,
                         block_tokens=(here, there), skip=skips, policy=policy, pull=skips[1] == 0)  # fmt: skip
    yield Layout("prefix_latent", NHD, NHD, heads=1, head_dim=576, group={"has_v": False}, skip=(3, 5))
    yield Layout("prefix_state", NHD, NHD, heads=1, head_dim=64, group={"has_v": False, "state": True}, skip=(3, 5))
    yield Layout("prefix_float32", DIM_OUTSIDE, HND, dtypes=("float32", "bfloat16"), policy="mixed", skip=(7, 2), tokens=3)
    yield Layout("prefix_owned", NHD, HND, memory=("owned", "file"), policy="mixed", skip=(1, 6))


def _shapes():
    for dim in (8, 64, 72, 80, 96, 128, 192, 256, 1024):
        for policy in ("raw", "mixed"):
            yield Layout(f"dim{dim}_{policy}", NHD, HND, head_dim=dim, tokens=70, pull=dim % 128 == 0, policy=policy)
    for heads in (1, 3, 5, 8, 33, 128):
        yield Layout(f"heads{heads}", FUSED_NHD, NHD, heads=heads, head_dim=64, policy="mixed", layers=(3, 9))
    for here, there in ((1, 256), (256, 1), (8, 16), (16, 8), (32, 7), (16, 256), (5, 32)):
        for policy in ("raw", "mixed"):
            yield Layout(
                f"pages{here}to{there}_{policy}", NHD, HND, head_dim=16, tokens=300, block_tokens=(here, there),
                policy=policy, pull=there == 16,
            )  # fmt: skip
    yield Layout("one_token", NHD, HND, heads=8, tokens=1)
    yield Layout("full_last_page", NHD, HND, tokens=16, policy="mixed")
    yield Layout("several_chunks", NHD, HND, heads=8, head_dim=128, tokens=601, block_tokens=(16, 32), policy="mixed")
    yield Layout("several_chunks_raw", FUSED_HND, NHD, heads=8, head_dim=128, tokens=601, block_tokens=(32, 16))
    yield Layout("more_blocks_than_needed", NHD, NHD, extra_blocks=2, policy="mixed")
    yield Layout("latent", NHD, NHD, heads=1, head_dim=576, group={"has_v": False})
    yield Layout("state", NHD, NHD, heads=1, head_dim=1024, group={"has_v": False, "state": True}, dtypes=("bfloat16", "bfloat16"))
    yield Layout("sliding_window", NHD, HND, policy="mixed", group={"sliding_window_tokens": 8})
    yield Layout("tensor_parallel", NHD, HND, policy="mixed", group={"heads_total": 8, "head_first": 4})
    yield Layout("many_layers", ONE_TENSOR, NHD, layers=tuple(range(40)), head_dim=16, policy="mixed")
    yield Layout("sparse_layer_numbers", NHD, ONE_TENSOR, layers=(1, 7, 60), policy="mixed")


def _memories():
    kinds = ("shm", "file", "owned")
    for i, here in enumerate(kinds):
        for j, there in enumerate(kinds):
            policy = ("raw", "mixed")[(i + j) % 2]
            yield Layout(f"{here}_to_{there}", NHD, HND, memory=(here, there), policy=policy, pull=(i + j) % 3 == 1)


def _dtypes():
    kinds = ("float16", "bfloat16", "float32")
    for here in kinds:
        for there in kinds:
            for policy in ("raw", "mixed"):
                yield Layout(f"{here}_to_{there}_{policy}", NHD, HND, dtypes=(here, there), policy=policy, tokens=37)


LAYOUTS = [*_pairs(), *_prefixes(), *_shapes(), *_memories(), *_dtypes()]
