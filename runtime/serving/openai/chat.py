"""A conversation as a prompt, by the checkpoint's chat template, and what its answer may hold."""

from collections.abc import Mapping
from typing import Any

from hemiola.runtime.errors import Name, Refused, shown
from hemiola.runtime.json_file import Repeated, parse_json
from hemiola.runtime.serving.openai.answer import THINK, THINK_END, Expected
from hemiola.runtime.serving.openai.message import Message
from hemiola.runtime.serving.openai.model import ServedModel
from hemiola.runtime.serving.openai.schema import ChatRequest, Tool
from hemiola.runtime.text import Text

KWARGS = "chat_template_kwargs"
RESERVED = ("self", "messages", "tools", "chat_template")


def render(model: ServedModel, request: ChatRequest) -> tuple[str, Expected]:
    """The prompt, and what to look for in the answer."""
    text = model.need_text("messages")
    template = text.template or ""
    variables = request.chat_template_kwargs or {}
    variables = _effort(request.reasoning_effort, text.variables) | variables
    tools = request.tools if request.tool_choice != "none" else None
    if template:
        _check_variables(variables, text.variables)
    shown = [_tool(tool) for tool in tools or ()] or None
    if shown and "tools" not in text.variables and template and not request.forced:
        said = "this checkpoint's chat template shows no tools to the model"
        raise Refused("unsupported", "tools", message=said, way_out=("force one by ", Name("tool_choice")))
    messages = [_message(message, i, "developer" in template) for i, message in enumerate(request.messages)]
    prompt = text.chat(messages, tools=shown, **variables)
    expected = Expected(
        thinking=prompt.rstrip().endswith(THINK),
        may_think=THINK in template,
        opens_thoughts=_opens_thoughts(text, prompt),
        tools={tool.function.name: tool.function.parameters or {} for tool in tools} if tools else None,
        one_call=request.parallel_tool_calls is False,
        forced=request.forced,
        json=_is_json(request),
    )
    return prompt, expected


def _is_json(request: ChatRequest) -> bool:
    """By its grammar, whoever wrote that."""
    given = (request.model_extra or {}).get("structured_outputs")
    if isinstance(given, dict):
        return given.get("json") is not None or bool(given.get("json_object"))
    return request.response_format is not None and request.response_format.type != "text"


def _opens_thoughts(text: Text, prompt: str) -> bool:
    """A model that learned to has a token for it. Another would begin one by accident, and never end it."""
    has_token = text.tokenizer.token_to_id(THINK) is not None
    return THINK in (text.template or "") and has_token and not prompt.rstrip().endswith(THINK_END)


def _effort(effort: str | None, read: frozenset[str]) -> dict[str, Any]:
    """As a template takes it: by name, or as thinking or not. One that knows neither is as it is."""
    if effort is None:
        return {}
    known = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return {name: value for name, value in known.items() if name in read}


def _check_variables(given: Mapping[str, Any], read: frozenset[str]) -> None:
    for name in given:
        if name in RESERVED:
            reason = "which is none of its own"
        elif name not in read:
            known = ", ".join(sorted(read - set(RESERVED))) or "none"
            reason = f"which the checkpoint's chat template does not read (it reads {known})"
        else:
            continue
        message = (Name(KWARGS), f" holds {shown(name)}, {reason}")
        raise Refused("unknown", KWARGS, message=message, way_out="take it out")


def _message(message: Message, index: int, knows_developer: bool) -> dict[str, Any]:
    """As templates expect it: content is a text, and a call's arguments are an object."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" and not knows_developer else message.role
    made: dict[str, Any] = {"role": role, "content": content or ""}
    more = {"name": message.name, "reasoning_content": message.thought, "tool_call_id": message.tool_call_id}
    made |= {name: value for name, value in more.items() if value is not None}
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"messages[{index}].tool_calls[{i}]"),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return made


def _arguments(text: str, call: str) -> dict[str, Any]:
    field = f"{call}.function.arguments"
    try:
        arguments = parse_json(text or "{}", unique=True)
    except Repeated as error:
        message = (Name(field), f": {error}")
        raise Refused("conflict", field, message=message, way_out="give it once") from None
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        message = (Name(field), " is not a JSON object")
        raise Refused("malformed", field, message=message, way_out="send what the call had")
    return arguments


def _tool(tool: Tool) -> dict[str, Any]:
    function = tool.function.model_dump(exclude={"strict"})
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}
