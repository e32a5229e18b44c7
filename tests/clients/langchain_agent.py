# needs: langchain langchain-openai
"""LangChain's quick start: a model with tools, and an agent that loops."""

import os

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str) -> str:
    """Get weather for a given city."""
    return f"It's always sunny in {city}!"


model = ChatOpenAI(
    model="hemiola", base_url=os.environ["OPENAI_BASE_URL"], api_key="none", max_tokens=64, temperature=0
)
assert model.invoke("Write a Python function.").content
assert "".join(chunk.content for chunk in model.stream("Write a Python function."))

called = model.bind_tools([get_weather], tool_choice="any").invoke("What is the weather in Paris?")
assert called.tool_calls[0]["name"] == "get_weather", called

agent = create_agent(model=model, tools=[get_weather], system_prompt="You are a helpful assistant")
answer = agent.invoke({"messages": [{"role": "user", "content": "what is the weather in sf"}]})
assert answer["messages"][-1].type == "ai"

call = {"name": "get_weather", "args": {"city": "sf"}, "id": "c1", "type": "tool_call"}
thought = {"type": "reasoning", "reasoning": "It may rain."}
turn = AIMessage([thought], tool_calls=[call], response_metadata={"output_version": "v1"})
history = [HumanMessage("what is the weather in sf"), turn, ToolMessage("14 C", tool_call_id="c1")]
by_items = ChatOpenAI(
    model="hemiola", base_url=os.environ["OPENAI_BASE_URL"], api_key="none", use_responses_api=True
)
for one in (model, by_items):  # a thinking model's turn goes back
    assert one.bind_tools([get_weather]).invoke(history, max_tokens=24).type == "ai"
print(called.tool_calls[0])
