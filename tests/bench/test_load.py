import json

import pytest
from bench.load import parse
from hypothesis import given
from hypothesis import strategies as st


def events(texts: list[str]) -> list[bytes]:
    details = {"prompt_tokens": 7, "completion_tokens": len(texts), "prompt_tokens_details": {"cached_tokens": 4}}
    chunks = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    data = [json.dumps(chunk) for chunk in [*chunks, {"choices": [], "usage": details}]]
    return [f"data: {each}\n\n".encode() for each in [*data, "[DONE]"]]


def http(parts: list[bytes]) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])


def test_a_piece_has_the_time_of_the_bytes_that_complete_its_event() -> None:
    first, second, *rest = events(["one", "two"])
    data = http([first, second, *rest])
    cut = data.index(b"two")  # the second event comes in two packets
    answer = parse(0.5, [(1.0, data[: data.index(second)]), (2.0, data[data.index(second) : cut]), (3.0, data[cut:])])
    assert answer.pieces == [(1.0, 3), (3.0, 3)]
    assert answer.first_s == 0.5
    assert (answer.num_prompt_tokens, answer.num_cached_tokens, answer.num_output_tokens) == (7, 4, 2)
    assert (answer.text, answer.error, answer.ended_s) == ("onetwo", "", 3.0)


@given(st.lists(st.sampled_from(["a", "bc", "é"]), min_size=1, max_size=5), st.data())
def test_text_does_not_depend_on_how_the_bytes_arrive(texts: list[str], draw: st.DataObject) -> None:
    data = http(events(texts))
    cuts = sorted(draw.draw(st.sets(st.integers(1, len(data) - 1), max_size=10)))
    chunks = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    answer = parse(0.0, [(float(i), chunk) for i, chunk in enumerate(chunks)])
    assert answer.text == "".join(texts)
    assert [time for time, _ in answer.pieces] == sorted(time for time, _ in answer.pieces)
    assert answer.error == ""


@pytest.mark.parametrize(
    ("data", "status", "error"),
    [
        (b"", 0, "no answer"),
        (b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nfull", 429, "full"),
        (http([*events(["one"])[:1], b'data: {"error":{"code":500}}\n\n']), 200, '{"code": 500}'),
        (http(events(["one"])[:1]), 200, "the stream ended early"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(data: bytes, status: int, error: str) -> None:
    answer = parse(0.0, [(1.0, data)] if data else [])
    assert (answer.status, answer.error) == (status, error)
