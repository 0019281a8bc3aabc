"""Where a Group says the bytes lie, against where numpy finds them."""

import errno
import os
import pathlib
import resource
import signal
import stat
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import spectrumkv as skv

AXES = ["LPBTHD", "LPBHTD", "LBPTHD", "LBPHTD", "BLPTHD", "PBLTHD", "LPBHDT", "DTHBPL"]


def element_at(memory, tensor, dtype, b, t, h, d):
    at = (
        tensor.offset_bytes
        + b * tensor.block_stride_bytes
        + t * tensor.token_stride_bytes
        + h * tensor.head_stride_bytes
        + d * tensor.dim_stride_bytes
    )
    return memory[at : at + dtype.itemsize].view(dtype)[0]


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_schema_and_view_name_the_same_elements(axes, dtype):
    group = skv.Group(layers=[3, 8], heads=2, head_dim=8, block_tokens=3, num_blocks=4, dtype=dtype, axes=axes)
    memory = np.zeros(group.size_bytes + 64, np.uint8)
    view = group.view(memory, 64)
    assert view.shape == group.shape == (2, 2, 4, 3, 2, 8)
    assert np.shares_memory(view, memory)
    view[...] = np.arange(view.size).reshape(view.shape) % 2000
    schema = group.to_proto(1, 64)
    assert [layer.layer for layer in schema.layers] == [3, 8]
    for index, layer in enumerate(schema.layers):
        for plane, tensor in enumerate((layer.k, layer.v)):
            assert tensor.segment == 1
            for at in np.ndindex(4, 3, 2, 8):
                assert element_at(memory, tensor, group.numpy_dtype, *at) == view[(index, plane, *at)]


@pytest.mark.parametrize(
    "layout, fused, order",
    [("NHD", False, "LPBTHD"), ("HND", False, "LPBHTD"), ("NHD", True, "LBPTHD"), ("HND", True, "LBPHTD")],
)
def test_named_layouts(layout, fused, order):
    group = skv.Group(layers=[0], heads=2, head_dim=8, block_tokens=3, num_blocks=4, layout=layout, fused=fused)
    assert group.memory_axes == order


def test_one_latent_tensor_has_no_v():
    group = skv.Group(layers=[0], heads=1, head_dim=576, block_tokens=4, num_blocks=2, has_v=False)
    assert group.shape[1] == 1
    assert not group.to_proto(0, 0).layers[0].HasField("v")


def test_wrong_names_are_refused():
    with pytest.raises(ValueError, match="int4"):
        skv.Group(layers=[0], heads=1, head_dim=8, block_tokens=1, num_blocks=1, dtype="int4")
    with pytest.raises(ValueError, match="NDH"):
        skv.Group(layers=[0], heads=1, head_dim=8, block_tokens=1, num_blocks=1, layout="NDH")
    with pytest.raises(ValueError, match="permutation"):
        skv.Group(layers=[0], heads=1, head_dim=8, block_tokens=1, num_blocks=1, axes="LPBTH")


def test_block_runs_join_neighbours_in_order():
    runs = skv.block_runs([5, 6, 7, 3, 4, 9, 8], group=2)
    assert runs.group == 2
    assert [(run.first, run.count) for run in runs.runs] == [(5, 3), (3, 2), (9, 1), (8, 1)]
    assert len(skv.block_runs([]).runs) == 0


def test_segment_is_shared_populated_and_removed():
    segment = skv.SharedSegment(3 * 4096 + 17)
    path = "/dev/shm" + segment.name
    try:
        info = os.stat(path)
        assert stat.S_IMODE(info.st_mode) == 0o660
        assert info.st_gid == os.stat("/dev/shm").st_gid or os.geteuid() != 0
        assert info.st_size == 3 * 4096 + 17
        assert info.st_blocks * 512 >= info.st_size
        with open(path, "r+b") as other:
            # No hole: the first one is the implicit one at the end of the file.
            assert os.lseek(other.fileno(), 0, os.SEEK_HOLE) == info.st_size
            segment.memory[-1] = 7
            other.seek(-1, os.SEEK_END)
            assert other.read() == b"\x07"
    finally:
        segment.close()
    assert not os.path.exists(path)
    segment.memory[0] = 1  # still mapped
    segment.close()


def test_segment_that_finds_no_room_says_how_much_and_where(tmp_path):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # as a file system that is full
    try:
        skv.SharedSegment(1 << 20, "fits", str(tmp_path)).close()
        with pytest.raises(OSError, match=rf"{(1 << 20) + 1} bytes: '{tmp_path}/large'") as refused:
            skv.SharedSegment((1 << 20) + 1, "large", str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert refused.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_segment_never_takes_over_another():
    first = skv.SharedSegment(4096)
    try:
        with pytest.raises(FileExistsError):
            skv.SharedSegment(4096, first.name)
        assert os.path.exists("/dev/shm" + first.name)
    finally:
        first.close()


_OWNER = """
import os, sys
import spectrumkv as skv
segment = skv.SharedSegment(4096, sys.argv[2], sys.argv[1])
pid = os.fork() if sys.argv[3] == "forks" else 1
if pid:
    print(segment.name, pid, flush=True)
sys.stdin.read()
"""


def owner(directory, name="", forks=False):
    """A process that has made a segment: (process, file, pid of its child)."""
    process = subprocess.Popen([sys.executable, "-c", _OWNER, str(directory), name, "forks" if forks else ""],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    made, child = process.stdout.readline().split()
    return process, pathlib.Path(directory, made.lstrip("/")), int(child)


def end(process):
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_segments_of_the_dead_are_swept_and_no_others(tmp_path):
    dead, left, _ = owner(tmp_path)
    named, chosen, _ = owner(tmp_path, "engine-kv")
    alive, kept, _ = owner(tmp_path)
    try:
        target = tmp_path / "target"
        target.write_text("not ours")
        (tmp_path / "spectrumkv-kv-link").symlink_to(target)
        (tmp_path / "spectrumkv-kv-folder").mkdir()
        os.mkfifo(tmp_path / "spectrumkv-kv-pipe")
        assert skv.sweep_stale_segments(str(tmp_path)) == []  # all of them live
        end(dead)
        end(named)
        assert left.exists() and chosen.exists()
        mine = skv.SharedSegment(4096, "", str(tmp_path))  # sweeps first
        others = {"target", "spectrumkv-kv-link", "spectrumkv-kv-folder", "spectrumkv-kv-pipe", mine.name[1:]}
        assert {path.name for path in tmp_path.iterdir()} == others | {chosen.name, kept.name}
        # A name that its caller chose is swept where the caller says so.
        assert skv.sweep_stale_segments(str(tmp_path), "engine-") == ["engine-kv"]
        mine.close()
    finally:
        end(alive)
    assert skv.sweep_stale_segments(str(tmp_path)) == [kept.name]
    for nowhere in (tmp_path / "missing", target):  # nothing was swept there, and that must not look as if it was
        with pytest.raises(OSError):
            skv.sweep_stale_segments(str(nowhere))


def test_a_child_that_still_has_the_segment_keeps_it(tmp_path):
    process, path, child = owner(tmp_path, forks=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert skv.sweep_stale_segments(str(tmp_path)) == [] and path.exists()
    os.kill(child, signal.SIGKILL)
    end_at = time.monotonic() + 20
    while not (swept := skv.sweep_stale_segments(str(tmp_path))) and time.monotonic() < end_at:
        time.sleep(0.01)
    assert swept == [path.name]
    end(process)


def test_files_of_others_are_not_swept(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("SKIPPED: only root can make a file of another user")
    path = tmp_path / "spectrumkv-kv-1-other"
    path.write_text("x")
    os.chown(path, 65534, 65534)
    assert skv.sweep_stale_segments(str(tmp_path)) == [] and path.exists()


def test_a_sweep_never_takes_a_segment_that_is_being_made(tmp_path):
    over = threading.Event()

    def sweep():
        while not over.is_set():
            skv.sweep_stale_segments(str(tmp_path))

    sweepers = [threading.Thread(target=sweep) for _ in range(2)]
    for thread in sweepers:
        thread.start()
    try:
        made = []
        for _ in range(400):
            made.append(skv.SharedSegment(4096, "", str(tmp_path)))
            assert (tmp_path / made[-1].name[1:]).exists()
    finally:
        over.set()
        for thread in sweepers:
            thread.join()
    assert {path.name for path in tmp_path.iterdir()} == {segment.name[1:] for segment in made}
    for segment in made:
        segment.close()
    assert list(tmp_path.iterdir()) == []


def test_segment_goes_with_its_owner():
    segment = skv.SharedSegment(4096)
    path = "/dev/shm" + segment.name
    assert os.path.exists(path)
    del segment
    assert not os.path.exists(path)
