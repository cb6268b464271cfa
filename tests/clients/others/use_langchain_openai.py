"""langchain-openai: chat (also streamed, with tools and structured output), and embeddings."""

from checks import EMBED, OPENAI_URL, QUESTION, TEXT, TIMEOUT_S, TOKEN, check, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    city: str
    population: int


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


def chat(**options) -> ChatOpenAI:
    settings = {"temperature": 0, "max_tokens": 24, "seed": 1, "timeout": TIMEOUT_S, "max_retries": 0, **options}
    return ChatOpenAI(model=TEXT, base_url=OPENAI_URL, api_key=TOKEN, **settings)


@check(TEXT)
def streamed_and_whole_are_alike():
    whole = chat().invoke(QUESTION)
    parts = list(chat(stream_usage=True).stream(QUESTION))
    assert whole.content.strip()
    assert "".join(part.content for part in parts) == whole.content
    total = parts[0]
    for part in parts[1:]:
        total += part
    assert total.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"], total.usage_metadata


@check(TEXT)
async def async_calls_at_once():
    first, second = await chat().abatch([QUESTION, QUESTION])
    assert first.content == second.content


@check(TEXT)
def a_tool_and_its_result():
    bound = chat(max_tokens=128).bind_tools([get_weather], tool_choice="get_weather")
    messages = [HumanMessage("What is the weather in Paris?")]
    answer = bound.invoke(messages)
    [call] = answer.tool_calls
    assert call["name"] == "get_weather"
    assert isinstance(call["args"]["city"], str)
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert chat().invoke([*messages, answer, result]).content.strip()


@check(TEXT)
def structured_output_of_every_method():
    for method in ("json_schema", "function_calling"):
        model = chat(max_tokens=128).with_structured_output(City, method=method)
        assert isinstance(model.invoke("Paris has 2100000 people."), City), method


@check(TEXT)
def through_responses():
    answer = chat(use_responses_api=True, seed=None, max_tokens=32).invoke(QUESTION)
    assert answer.text.strip()
    assert answer.usage_metadata["output_tokens"] > 0


@check(EMBED)
def embeddings():
    model = OpenAIEmbeddings(model=EMBED, base_url=OPENAI_URL, api_key=TOKEN, check_embedding_ctx_length=False)
    first, second = model.embed_documents(["a cat", "revenue"])
    again = model.embed_query("a cat")
    assert len(first) == len(second) == len(again)
    assert max(abs(a - b) for a, b in zip(first, again, strict=True)) < 1e-3


if __name__ == "__main__":
    run()
