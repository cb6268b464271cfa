import re
from pathlib import Path

import pytest
from doubles import manifest

from edge.cli.init import FILES
from edge.config.file import load
from edge.errors import WeightsError
from edge.weights.manifest import DEFAULT_NAME, DEFAULT_SPEC, FILE_NAME, Manifest

ROOT = Path(__file__).parent.parent.parent


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


def test_the_default_model_is_the_same_one_wherever_it_is_written_out() -> None:
    makefile = (ROOT / "Makefile").read_text()
    texts = [makefile, (ROOT / "README.md").read_text(), *FILES.values()]
    texts += [path.read_text() for path in ROOT.glob("examples/*/README.md")]
    assert {spec for text in texts for spec in re.findall(r"pypi:llm-[\w.=-]*\w", text)} == {DEFAULT_SPEC}
    assert f".edge/models/{DEFAULT_NAME}/{FILE_NAME}" in makefile
    for config in (ROOT / "wrangler-like.toml", ROOT / "examples" / "chat" / "wrangler-like.toml"):
        ai = load(config, ROOT).ai
        assert ai is not None
        assert set(ai.models.values()) == {DEFAULT_NAME}
    assert f'= "{DEFAULT_NAME}"' in FILES["wrangler-like.toml"]
