from __future__ import annotations

from pathlib import Path

import pytest

from edge import errors
from edge.cli.errors import markdown
from edge.errors import BY_CODE, ApiError, EdgeError, catalogue

CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, EdgeError)]


def test_a_code_tells_which_error_of_the_engine_it_was() -> None:
    assert {code: kind.code for code, kind in BY_CODE.items()} == {code: code for code in BY_CODE}
    error = BY_CODE[5021]("too long", param="max_tokens")
    assert type(error).__name__ == "PromptTooLong"
    assert (error.status, error.message, error.param) == (413, "too long", "max_tokens")


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_class_says_what_programs_need(kind: type[EdgeError]) -> None:
    assert 400 <= kind.status <= 599
    assert kind.exit_code in (1, 2)
    assert kind.name
    assert kind.openai_type.endswith("_error")
    # What the caller did wrong does not get better by trying again.
    assert not (kind.retryable and issubclass(kind, ApiError))


def test_the_catalogue_explains_each_error_and_names_it_once() -> None:
    found = catalogue()
    assert len({kind.name for kind in found}) == len(found)
    for kind in found:
        for text in (kind.cause, kind.remedy):
            assert text.endswith("."), f"{kind.__name__}: {text!r} is no sentence"
            assert "|" not in text  # of a table
    # What has a code of its own can be met, and what can be met is explained, except where only handlers meet it.
    for kind in CLASSES:
        if issubclass(kind, ApiError) and "code" in vars(kind) and kind is not ApiError:
            assert kind in found, f"{kind.__name__} has no cause and remedy"


def test_the_documentation_has_the_table() -> None:
    text = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
    _, _, rest = text.partition("<!-- edge errors --markdown -->\n")
    table, _, _ = rest.partition("<!-- end -->")
    assert table.strip() == markdown(), "put what `edge errors --markdown` prints into docs/errors.md"
