"""`.metadata`: torch.distributed.checkpoint can read it, and reading it never runs code."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_fp4.checkpoint.files import DamagedCheckpointError
from megatron_fp4.checkpoint.pickles import read_pickle
from megatron_fp4.checkpoint.shards import METADATA, Piece, TensorInfo, metadata_of, read_metadata

TENSORS = [TensorInfo(("model", "w"), torch.float32, (6, 2)), TensorInfo(("optimizer", "w.step"), torch.float32, ())]
PIECES = {
    "__0_0.distcp": [Piece(0, (0, 0), (4, 2), 0, 40), Piece(1, (), (), 40, 4)],
    "__1_0.distcp": [Piece(0, (4, 0), (2, 2), 0, 20)],
}


def test_metadata_written_by_torch_can_be_read(tmp_path: Path) -> None:
    """In older checkpoints torch wrote the file."""
    save({"model": {"w": torch.arange(3.0)}}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    read = read_metadata((tmp_path / METADATA).read_bytes())
    assert read.state_dict_metadata["model.w"].size == torch.Size((3,))
    assert list(read.storage_data) == [MetadataIndex("model.w", [0])]


def test_a_crafted_file_changes_no_class() -> None:
    """A pickle may set attributes of a class that it is allowed to name; the change would stay."""
    # Opcodes: the class; a state with slots, {"parent": "elsewhere"}; BUILD; pop. Valid metadata follows.
    state = b"(N}(X\x06\x00\x00\x00parentX\x09\x00\x00\x00elsewhereutb0"
    prefix = b"\x80\x04cpathlib\nPurePosixPath\n" + state
    with pytest.raises(DamagedCheckpointError):
        read_metadata(prefix + metadata_of(TENSORS, PIECES)[2:])
    assert Path("/a/b").parent == Path("/a")
    # Plain pickle does change the class. In another process, because the change stays.
    program = "import pathlib, pickle, sys; pickle.loads(sys.stdin.buffer.read()); print(pathlib.PurePosixPath.parent)"
    seen = subprocess.run([sys.executable, "-c", program], input=prefix + b"N.", capture_output=True, check=True).stdout
    assert seen.strip() == b"elsewhere"


def repeating(place: str) -> bytes:
    """A small file with the same list of chunks of many tensors, or the same path of many names."""
    crafted: Any = pickle.loads(metadata_of(TENSORS, PIECES))
    names, several = [f"tensor {number}" for number in range(20_000)], crafted.state_dict_metadata["model.w"]
    several.chunks *= 20_000
    if place == "chunks":
        crafted.state_dict_metadata |= dict.fromkeys(names, several)
    else:
        crafted.planner_data |= dict.fromkeys(names, ("part",) * 1_000_000)
    return pickle.dumps(crafted)


# A tuple of twice the same tuple of twice ..., which Python would hash.
TUPLES = b"".join(bytes([0x68, i, 0x68, i, 0x86, 0x94]) for i in range(60))


@pytest.mark.parametrize(
    "content",
    [
        *(
            b"\x80\x04Nr\xff\xff\xff\x1f.",
            b"\x80\x04\x8e" + (4 << 30).to_bytes(8, "little") + b".",
        ),  # gigabytes in Python
        *(b"\x80\x04}()\x94" + TUPLES + b"Nu.", repeating("chunks"), repeating("paths")),
        *(b"", b"nonsense", pickle.dumps({"a": 1}), metadata_of(TENSORS, PIECES)[:-40]),
        *(
            b"\x80\x04c" + name + b"."
            for name in (b"builtins\ngetattr\n", b"torch\nload\n", b"torch.float32\n__reduce__\n")
        ),
    ],
)
def test_unreadable_metadata_is_reported_as_damage(content: bytes) -> None:
    with pytest.raises(DamagedCheckpointError):
        read_metadata(content)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_values_are_read_as_python_reads_them(protocol: int) -> None:
    numbers = [0, 1, -1, 255, 256, 65536, -(2**31), 2**31, 2**70, -(2**2100), 0.1, True, False, None]
    texts = ["", "a" * 300, "ü", "\ud800", "x" * 70_000]
    nested = [numbers, tuple(texts), (1,), (1, 2), (1, 2, 3), {"a": {1: [], None: ()}}, {texts[1]: texts}]
    assert read_pickle(pickle.dumps([*nested, nested], protocol)) == [*nested, nested]
    named = read_pickle(pickle.dumps({"type": torch.float32, "when": Path("/a"), (1, 2): {3}}, protocol))
    assert named["type"] is torch.float32 and named["when"].name.endswith("PosixPath") and len(named) == 3
