"""docs/compatibility.md names every route and every option, and no others.

`python tests/test_compatibility.py` writes the tables of options anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from edge.ai import embeddings, schemas
from edge.ai.completions import COMPLETION
from edge.ai.fields import Field, Ignored, Table, Unsupported
from edge.ai.response_bodies import RESPONSE
from edge.node.api.openapi import document

FILE = Path(__file__).parent.parent / "docs" / "compatibility.md"
BEGIN, END = "<!-- options: made by tests/test_compatibility.py -->\n", "<!-- end of options -->"
OPENAI = "/accounts/{account}/ai/v1"
TABLES: dict[str, Table] = {
    "Text generation, `ai/run`": schemas.NATIVE,
    "Chat completions": schemas.CHAT,
    "Completions": COMPLETION,
    "Responses": RESPONSE,
    "Embeddings and ranking, `ai/run`": embeddings.NATIVE,
    "Embeddings": embeddings.OPENAI,
}
_ROW = re.compile(r"^\| `((?:GET|POST|PUT|PATCH|DELETE) /\S*)` \|", re.MULTILINE)


def test_every_route_is_in_the_tables_once() -> None:
    named = _ROW.findall(FILE.read_text())
    assert len(named) == len(set(named))
    assert set(named) == set(_routes())


def test_every_option_is_in_the_tables() -> None:
    text = FILE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == options(), f"run `python {__file__}`"


def _routes() -> Iterator[str]:
    """Method and path of each; OpenAI's below their base URL, which there are two of."""
    for path, methods in document()["paths"].items():
        short = path.removeprefix("/client/v4").removeprefix(OPENAI).removeprefix("/v1")
        yield from (f"{method.upper()} {short}" for method in methods)


def options() -> str:
    """The tables of options."""
    lines = []
    for title, table in TABLES.items():
        lines += ["", f"### {title}", "", "| option | state | |", "|---|---|---|"]
        lines += [f"| `{name}` | {_state(field)} | {_words(field)} |" for name, field in table.items()]
    return "\n".join([*lines, "", ""])


def _state(field: Field) -> str:
    match field:
        case Ignored():
            return "no effect"
        case Unsupported():
            return "refused"
        case _:
            return "works"


def _words(field: Field) -> str:
    text = field.description.removeprefix("Has no effect").lstrip(".: ")
    return f"{text[:1].upper()}{text[1:]}".replace("|", "\\|")


if __name__ == "__main__":
    before, _, rest = FILE.read_text().partition(BEGIN)
    FILE.write_text(before + BEGIN + options() + END + rest.partition(END)[2])
