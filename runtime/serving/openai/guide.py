"""What an answer must be, as `structured_outputs`: JSON for response_format, calls for a forced tool_choice.

A thought stays free: the grammar begins behind it.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from hemiola.runtime.errors import Name, Refused
from hemiola.runtime.serving.openai.answer import THINK, THINK_END, Expected
from hemiola.runtime.serving.openai.schema import ChatRequest, Tool, ToolChoice

CALL_END = "}\n</tool_call>"
# As Python writes it: with white space at will, a model that is unsure may write nothing else.
FORM = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
ANY_OBJECT = {"type": "object"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def guide(request: ChatRequest, expected: Expected) -> dict[str, Any] | None:
    """None: the answer is free."""
    given = (request.model_extra or {}).get("structured_outputs")
    schema = _schema(request)
    if given is not None:
        _check_alone(request, expected, schema)
        return None  # it goes on as it is
    if request.forced:
        return {"grammar": "\n".join([*_thought(expected, "calls"), *_calls(request)])}
    if schema is None:
        return None
    if not (expected.thinking or expected.opens_thoughts or expected.tools):
        return {"json": schema}
    lines = list(_thought(expected, "answer"))
    if expected.tools:
        lines += ["answer: object | call", f"object: %json {json.dumps(schema)}"]
        lines += ['call: "<tool_call>" REST', "REST: /(?s:.*)/"]  # as free as without response_format
    else:
        lines.append(f"answer: %json {json.dumps(schema)}")
    return {"grammar": "\n".join(lines)}


def _schema(request: ChatRequest) -> dict[str, Any] | None:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    schema = wanted.json_schema.schema_ if wanted.json_schema is not None else None
    return FORM | (ANY_OBJECT if schema is None else schema)


def _check_alone(request: ChatRequest, expected: Expected, schema: dict[str, Any] | None) -> None:
    if request.forced or schema is not None:
        others = (Name("response_format"), " or a forced ", Name("tool_choice"))
        message = (Name("structured_outputs"), " beside ", *others)
        raise Refused("conflict", "structured_outputs", message=message, way_out="give one of them")
    if expected.thinking:
        why = " is about the whole answer, but the prompt ends within a thought"
        kwargs = (Name("chat_template_kwargs"), ' {"enable_thinking": false}')
        way_out = ("give ", *kwargs, ", or ", Name("response_format"), " instead")
        message = (Name("structured_outputs"), why)
        raise Refused("conflict", "structured_outputs", message=message, way_out=way_out)


def _thought(expected: Expected, answer: str) -> Iterator[str]:
    """Free until its end. The prompt may have begun it; else a model that opens thoughts may begin it."""
    if expected.thinking:
        yield f"start: thought BREAKS {answer}"
    elif expected.opens_thoughts:
        yield f'start: ("{THINK}" thought BREAKS)? {answer}'
    else:
        yield f"start: {answer}"
        return
    yield f'thought[suffix="{THINK_END}"]: /(?s:.*)/'
    yield "BREAKS: /\\n{0,4}/"


def _calls(request: ChatRequest) -> Iterator[str]:
    """One call, or as many as the model likes. Their JSON is read by calls.JsonCall."""
    tools = _allowed(request.tools or (), request)
    names = [f"call_{i}" for i in range(len(tools))]
    many = request.tool_choice == "required" and request.parallel_tool_calls is not False
    yield "calls: call (/\\n/ call)*" if many else "calls: call"
    yield f"call: {' | '.join(names)}"
    for name, tool in zip(names, tools, strict=True):
        parameters = tool.function.parameters
        schema = FORM | (NO_ARGUMENTS if parameters is None else ANY_OBJECT | parameters)
        head = f'<tool_call>\n{{"name": {json.dumps(tool.function.name)}, "arguments": '
        yield f"{name}: {json.dumps(head)} %json {json.dumps(schema)} {json.dumps(CALL_END)}"


def _allowed(tools: Sequence[Tool], request: ChatRequest) -> list[Tool]:
    choice = request.tool_choice
    if not isinstance(choice, ToolChoice):
        return list(tools)
    return [tool for tool in tools if tool.function.name == choice.function.name]
