from __future__ import annotations

import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import WeightsError
from edge.weights.gguf import BLOCKS, GgmlType, read_header


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str, dimensions: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def file(pairs: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


GOOD = file(
    [
        pair("general.architecture", 8, string("llama")),
        pair("a.bool", 7, b"\1"),
        pair("a.float", 6, struct.pack("<f", 0.5)),
        pair("a.list", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
        pair("a.words", 9, struct.pack("<IQ", 8, 2) + string("è") + string("")),
    ],
    [tensor("x", (32, 2), 2, 0), tensor("y", (3,), 0, 64)],
    bytes(64 + 12),
)


def read(folder: Path, content: bytes):
    path = folder / "model.gguf"
    path.write_bytes(content)
    return read_header(path)


def test_metadata_and_tensors_are_read(tmp_path: Path) -> None:
    header = read(tmp_path, GOOD)
    assert header.version == 3
    assert header.architecture == "llama"
    assert header.num_parameters == 67
    assert header.metadata == {
        "general.architecture": "llama",
        "a.bool": True,
        "a.float": 0.5,
        "a.list": [1, -2, 3],
        "a.words": ["è", ""],
    }
    x, y = header.tensors
    assert (x.name, x.shape, x.type, x.size_bytes) == ("x", (2, 32), GgmlType.Q4_0, 36)
    assert (y.name, y.shape, y.type, y.size_bytes) == ("y", (3,), GgmlType.F32, 12)
    assert (x.offset, y.offset) == (len(GOOD) - 76, len(GOOD) - 12)


def test_it_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tiny_models.save_gguf(tmp_path / "m.gguf")
    header, theirs = read_header(path), gguf.GGUFReader(path)
    assert {k: v for k, v in header.metadata.items() if v} == {
        name: field.contents()
        for name, field in theirs.fields.items()
        if not name.startswith("GGUF.") and field.contents()
    }
    assert [(t.name, t.shape, t.type, t.offset, t.size_bytes) for t in header.tensors] == [
        (t.name, tuple(int(n) for n in reversed(t.shape)), int(t.tensor_type), t.data_offset, t.n_bytes)
        for t in theirs.tensors
    ]


def test_block_sizes_agree_with_the_gguf_package() -> None:
    assert {int(kind): sizes for kind, sizes in BLOCKS.items()} == {
        int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items() if int(kind) in list(GgmlType)
    }


def test_version_2_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, file([], [], version=2)).version == 2


@pytest.mark.model
def test_the_packaged_model_is_read_fast(model_path: Path) -> None:
    started = time.perf_counter()
    header = read_header(model_path)
    assert time.perf_counter() - started < 5  # 0.03 s on an idle machine
    assert header.architecture == "llama"
    assert header.num_parameters == 134_515_008
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152


BAD = {
    "empty": (b"", "only 0 bytes"),
    "no magic": (b"GGML" + GOOD[4:], "does not start with the letters GGUF"),
    "version": (file([], [], version=1), "version 1 is not supported"),
    "big-endian": (file([], [], version=3 << 24), "big-endian"),
    "many tensors": (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0), "tensors is over the limit"),
    "many pairs": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 100_000), "no room for 100000 metadata entries"),
    "twice a key": (file([pair("k", 7, b"\0")] * 2, []), "metadata key 'k' occurs twice"),
    "long array": (file([pair("k", 9, struct.pack("<IQ", 6, 1 << 62))], []), "no room for array 'k'"),
    "long strings": (file([pair("k", 9, struct.pack("<IQ", 8, 1 << 62))], []), "no room for array 'k'"),
    "nested array": (file([pair("k", 9, struct.pack("<IQ", 9, 1))], []), "unsupported value type 9"),
    "value type": (file([pair("k", 77, b"")], []), "unknown value type 77"),
    "long key": (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 40) + bytes(99), "metadata key of"),
    "alignment": (file([pair("general.alignment", 4, struct.pack("<I", 48))], []), "general.alignment is 48"),
    "twice a tensor": (file([], [tensor("x", (8,), 0, 0), tensor("x", (8,), 0, 32)], bytes(64)), "'x' occurs twice"),
    "overlap": (file([], [tensor("x", (9,), 0, 0), tensor("y", (8,), 0, 32)], bytes(64)), "'x' and 'y' overlap"),
    "beyond": (file([], [tensor("x", (8,), 0, 32)], bytes(63)), "truncated: tensor 'x' ends at byte"),
    "huge": (file([], [tensor("x", (1 << 39, 1 << 39), 0, 0)], bytes(64)), "truncated: tensor 'x'"),
    "unaligned": (file([], [tensor("x", (8,), 0, 8)], bytes(64)), "not a multiple of 32"),
    "no values": (file([], [tensor("x", (0,), 0, 0)], bytes(64)), "impossible shape"),
    "dimensions": (file([], [tensor("x", (1,) * 9, 0, 0)], bytes(64)), "9 dimensions"),
    "storage": (file([], [tensor("x", (32,), 4, 0)], bytes(64)), "unknown storage type 4"),
    "blocks": (file([], [tensor("x", (31,), 2, 0)], bytes(64)), "rows of 31 values cannot be stored as Q4_0"),
}


@pytest.mark.parametrize(("content", "message"), list(BAD.values()), ids=list(BAD))
def test_a_corrupt_file_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        read(tmp_path, content)
    assert str(tmp_path / "model.gguf") in caught.value.message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be read: No such file"):
        read_header(tmp_path / "none.gguf")


@given(length=st.integers(0, len(GOOD) - 1))
def test_every_truncation_is_refused(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    with pytest.raises(WeightsError):
        read(tmp_path_factory.getbasetemp(), GOOD[:length])


@given(edits=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=6))
def test_no_damage_causes_anything_but_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]]
) -> None:
    damaged = bytearray(GOOD)
    for at, value in edits:
        damaged[at] = value
    try:
        header = read(tmp_path_factory.getbasetemp(), bytes(damaged))
    except WeightsError:
        return
    assert all(t.offset + t.size_bytes <= len(damaged) for t in header.tensors)


def test_reading_a_header_needs_no_torch() -> None:
    code = "import sys, edge.weights.gguf; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
