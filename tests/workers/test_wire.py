from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers import _wire
from workers._wire import Chunk, End, Fetch, Frame, FrameDecoder, FrameError, Log, Result, ToIsolate, ToNode, encode

IDS = st.integers(0, 2**63 - 1)
FRAMES = (
    st.builds(Chunk, IDS, st.binary())
    | st.builds(End, IDS)
    | st.builds(Log, IDS, st.text(), st.text())
    | st.builds(Result, IDS, st.none() | st.dictionaries(st.text(), st.lists(st.floats(allow_nan=False))))
    | st.builds(Fetch, IDS, st.text(), st.text(), st.lists(st.tuples(st.text(), st.text())), st.booleans())
)


@given(st.lists(FRAMES), st.integers(1, 40))
def test_frames_survive_any_cutting(frames: list[Frame], step: int):
    data = b"".join(map(encode, frames))
    decoder = FrameDecoder(ToNode | ToIsolate)
    received = [frame for at in range(0, len(data), step) for frame in decoder.feed(data[at : at + step])]
    assert received == frames


@given(st.binary(max_size=200))
def test_garbage_is_frames_or_a_frame_error(data):
    for union in (ToNode, ToIsolate):
        try:
            frames = FrameDecoder(union).feed(data)
        except FrameError:
            continue
        assert all(isinstance(frame, Frame) for frame in frames)


def test_a_frame_of_the_other_direction_is_refused():
    with pytest.raises(FrameError, match="unknown shape"):
        FrameDecoder(ToIsolate).feed(encode(Log(0, "log", "x")))


def test_too_long_frames_are_refused_on_both_sides():
    with pytest.raises(FrameError, match="over the limit"):
        encode(Chunk(1, bytes(_wire.MAX_FRAME_BYTES)))
    with pytest.raises(FrameError, match="over the limit"):
        FrameDecoder(ToNode).feed(b"\xff\xff\xff\xff")


def test_endless_nesting_is_refused():
    body = b"\x93" + msgspec.msgpack.encode("Result") + b"\x01" + b"\x91" * 100_000
    with pytest.raises(FrameError):
        FrameDecoder(ToIsolate).feed(len(body).to_bytes(4, "big") + body)
