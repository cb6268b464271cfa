from __future__ import annotations

from pathlib import Path

import pytest

from edge.errors import ConfigError
from edge.text_files import read_text


@pytest.mark.parametrize("content", [b"a\nb", b"a\r\nb", b"\xef\xbb\xbfa\nb"])
def test_text_of_any_editor_reads_alike(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert read_text(tmp_path / "file", "a list", 6) == "a\nb"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"1234567", "file is longer than 6 bytes; is it a list?"),
        (b"a\xff", "file is not UTF-8 text: byte 1 is 0xff"),
        (None, "file cannot be read: No such file"),
    ],
)
def test_what_is_no_such_text_is_refused(tmp_path: Path, content: bytes | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_text(tmp_path / "file", "a list", 6)
    assert problem in caught.value.message
