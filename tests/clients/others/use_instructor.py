"""instructor: typed answers by tool and by JSON schema, and partial ones from a stream."""

import instructor
from checks import OPENAI_URL, TEXT, TIMEOUT_S, TOKEN, check, run
from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    city: str
    population: int


OPTIONS = {
    "model": TEXT,
    "messages": [{"role": "user", "content": "Paris has 2100000 people."}],
    "temperature": 0,
    "max_tokens": 128,
    "max_retries": 1,
}


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=OPENAI_URL, api_key=TOKEN, timeout=TIMEOUT_S), mode=mode)


@check(TEXT)
def by_tool():
    assert isinstance(client(instructor.Mode.TOOLS).create(response_model=City, **OPTIONS), City)


@check(TEXT)
def by_json_schema():
    assert isinstance(client(instructor.Mode.JSON_SCHEMA).create(response_model=City, **OPTIONS), City)


@check(TEXT)
def partial_answers():
    whole = client(instructor.Mode.JSON_SCHEMA).create(response_model=City, **OPTIONS)
    parts = list(client(instructor.Mode.JSON_SCHEMA).create_partial(response_model=City, **OPTIONS))
    assert len(parts) > 1
    assert parts[-1].model_dump() == whole.model_dump()


if __name__ == "__main__":
    run()
