from __future__ import annotations

import pytest

from edge import errors
from edge.errors import BY_CODE, ApiError, EdgeError

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
