"""openai-agents: by its default, /responses, and by chat completions, with a tool that it is made to call."""

import os

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"  # it would call OpenAI

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from checks import OPENAI_URL, QUESTION, TEXT, TIMEOUT_S, TOKEN, check, run
from openai import AsyncOpenAI


def client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url=OPENAI_URL, api_key=TOKEN, timeout=TIMEOUT_S, max_retries=0)


async def answers(model) -> None:
    called = []

    @function_tool
    def get_weather(city: str) -> str:
        """Weather of a city."""
        called.append(city)
        return "sunny"

    settings = ModelSettings(temperature=0.0, max_tokens=128)
    plain = Agent(name="plain", instructions="You are terse.", model=model, model_settings=settings)
    assert (await Runner.run(plain, QUESTION)).final_output.strip()
    streamed = Runner.run_streamed(plain, QUESTION)
    kinds = {event.type async for event in streamed.stream_events()}
    assert "raw_response_event" in kinds, kinds
    assert streamed.final_output.strip()
    # After a forced call, agents let the model choose: what it says to the result ends the run.
    forced = ModelSettings(temperature=0.0, max_tokens=128, tool_choice="get_weather")
    agent = Agent(
        name="tools",
        model=model,
        tools=[get_weather],
        model_settings=forced,
        tool_use_behavior="stop_on_first_tool",
    )
    result = await Runner.run(agent, "What is the weather in Paris?")
    assert (len(called), result.final_output) == (1, "sunny")


@check(TEXT)
async def responses():
    await answers(OpenAIResponsesModel(TEXT, client()))


@check(TEXT)
async def chat_completions():
    await answers(OpenAIChatCompletionsModel(TEXT, client()))


if __name__ == "__main__":
    run()
