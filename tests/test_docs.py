"""What the Markdown files point to is there: files, headings, and commands of `edge`."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from edge.cli import cli

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*/README.md"))]
ABSENT = {"deploy"}
"""Commands that are named to say that there are none."""


def anchors(path: Path) -> set[str]:
    """The anchors of a file's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", file.read_text()):
        name, _, anchor = target.partition("#")
        path = (file.parent / name) if name else file
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist_with_their_options(file: Path) -> None:
    for words in re.findall(r"(?:^ *|`)edge ([a-z].*?)(?:`|#|$)", file.read_text(), re.MULTILINE):
        command: click.Command = cli
        for name in words.split():
            if name in ABSENT or name.startswith("-") or not isinstance(command, click.Group):
                break
            found = command.get_command(click.Context(command), name.rstrip("`,.:;"))
            assert found is not None, f"edge {words}"
            command = found
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"(?<= )--[a-z-]+", words)) <= known | {"--help", "--version"}, f"edge {words}"


def test_every_document_is_linked_from_the_readme_or_another() -> None:
    linked = {
        (file.parent / target.partition("#")[0]).resolve()
        for file in FILES
        for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", file.read_text())
    }
    assert {path for path in ROOT.glob("docs/*.md") if path.resolve() not in linked} == set()
