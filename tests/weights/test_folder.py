from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge.errors import WeightsError
from edge.weights.folder import find_shards, read_json, read_text


def shards(folder: Path) -> list[str]:
    return [path.name for path in find_shards(folder)]


def test_the_index_goes_first_then_the_usual_name_then_whatever_there_is(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "notes.txt"):
        (tmp_path / name).touch()
    assert shards(tmp_path) == ["a.safetensors", "b.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert shards(tmp_path) == ["model.safetensors"]
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "b.safetensors"}}')
    assert shards(tmp_path) == ["b.safetensors"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, r"has no weights; a model folder needs config\.json and \*\.safetensors"),
        ('{"weight_map": {"w": "../b.safetensors"}}', r"'\.\./b\.safetensors', which is not in the folder"),
        ('{"weight_map": {"w": "gone.safetensors"}}', r"'gone\.safetensors', which is not in the folder"),
        ('{"weight_map": 5}', r"index\.json: cannot be used: Expected `object`, got `int`"),
        ("{", r"index\.json: is not valid JSON"),
    ],
)
def test_a_folder_without_usable_weights_is_refused(tmp_path: Path, index: str | None, message: str) -> None:
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=message):
        find_shards(tmp_path)


def test_texts_are_read_within_limits(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(WeightsError, match=r"config\.json: is missing; a model folder needs"):
        read_json(path, dict[str, Any])
    path.write_text('{"a": "ü"}')
    assert read_json(path, dict[str, Any]) == {"a": "ü"}
    with pytest.raises(WeightsError, match="11 bytes is over the limit of 10"):
        read_text(path, 10)
    path.write_bytes(b"\xff")
    with pytest.raises(WeightsError, match="is not UTF-8"):
        read_text(path, 10)
