from pathlib import Path

import pytest
from doubles import manifest

from edge.errors import WeightsError
from edge.weights.manifest import FILE_NAME, Manifest


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = manifest(num_parameters=134_515_008, license="apache-2.0")
    written.write(tmp_path / FILE_NAME)
    assert Manifest.read(tmp_path / FILE_NAME) == written


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"format": 1', '"format": 2'),
        ('"size_bytes": 98362432', '"size_bytes": -1'),
        ('"name": "smollm2-135m-instruct"', '"name": "../evil"'),
        ('"created_at": "2026-11-30T12:00:00.123000Z"', '"created_at": "2026-11-30T12:00:00"'),
        ("{", ""),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / FILE_NAME
    manifest().write(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(WeightsError, match=r"manifest.json is no usable model manifest: .* edge models add"):
        Manifest.read(path)


def test_a_missing_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="No such file"):
        Manifest.read(tmp_path / FILE_NAME)
