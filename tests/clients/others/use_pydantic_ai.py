"""pydantic-ai: text, streamed text, a tool that it calls, and output types by tool and by JSON schema."""

from checks import OPENAI_URL, QUESTION, TEXT, TIMEOUT_S, TOKEN, check, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    city: str
    population: int


PROVIDER = OpenAIProvider(base_url=OPENAI_URL, api_key=TOKEN)
MODEL = OpenAIChatModel(TEXT, provider=PROVIDER)
SETTINGS = {"temperature": 0.0, "max_tokens": 128, "timeout": TIMEOUT_S}


@check(TEXT)
async def streamed_and_whole_are_alike():
    agent = Agent(MODEL, model_settings=SETTINGS)
    whole = await agent.run(QUESTION)
    async with agent.run_stream(QUESTION) as stream:
        text = "".join([part async for part in stream.stream_text(delta=True)])
    assert text.strip() == whole.output.strip()
    assert whole.usage.output_tokens > 0


@check(TEXT)
async def output_by_tool():
    agent = Agent(MODEL, output_type=ToolOutput(City), model_settings=SETTINGS)
    assert isinstance((await agent.run("Paris has 2100000 people.")).output, City)


@check(TEXT)
async def output_by_json_schema():
    agent = Agent(MODEL, output_type=NativeOutput(City), model_settings=SETTINGS)
    assert isinstance((await agent.run("Paris has 2100000 people.")).output, City)


@check(TEXT)
async def through_responses():
    agent = Agent(OpenAIResponsesModel(TEXT, provider=PROVIDER), model_settings=SETTINGS)
    assert (await agent.run(QUESTION)).output.strip()


if __name__ == "__main__":
    run()
