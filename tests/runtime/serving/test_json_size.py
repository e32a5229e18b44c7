"""What would hold everybody up is refused before it is read; what is long and simple is not."""

import pytest
from kit.refused import refused

from hemiola.runtime.errors import Refused
from hemiola.runtime.serving.ask import read_json
from hemiola.runtime.serving.json_size import (
    MAX_BRACKETS,
    MOST_NAMES,
    MOST_VALUES,
    check_brackets,
    check_size,
)
from hemiola.runtime.serving.openai.schema import ChatRequest, parse

FEW, MANY = MOST_NAMES + 10, MOST_VALUES + 10
NAMES, VALUES = "objects, lists and names", "values"


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("[" + "{}," * FEW + "1]", NAMES),
        ("[" + "[]," * FEW + "1]", NAMES),
        ("[" * FEW, NAMES),
        ('{"a":1' + ',"b":1' * FEW + "}", NAMES),
        ('{"a": "' + '\\\\", "b": "' * FEW + '"}', NAMES),  # those quotes end strings
        ("[" + "1," * MANY + "1]", VALUES),
        ("[" + '"a",' * MANY + "1]", VALUES),
        ('"",' * 2 * MANY, VALUES),
        ("[" + "1," * FEW + "1]", ""),
        ('"' + "[{:," * MANY + '"', ""),
        ('"' + '\\"[{:,' * MANY + '"', ""),
        ('"' + '\\"[{:,' * MANY, ""),  # never closed
    ],
    ids=lambda text: text[:12],
)
def test_a_text_of_many_small_things_is_read(text: str, refused: str) -> None:
    if not refused:
        return check_size("the body", text.encode())
    with pytest.raises(Refused, match=rf"^the body holds \d+ {refused}, the limit is \d+; send less$"):
        check_size("the body", text.encode())


def test_as_many_brackets_as_tritonserver_gets_are_refused() -> None:
    most = b'["{[' + b"{" * 9 + b'"' + b",[" * (MAX_BRACKETS - 1)
    check_brackets("the body", most)
    assert "1025 lists and objects, the limit is 1024" in str(
        refused(lambda: check_brackets("the body", most + b"{"))
    )


def test_both_doors_ask_first() -> None:
    many = "[" + "{}," * FEW + "{}]"
    body = f'{{"model": "m", "messages": {many}}}'.encode()
    assert str(refused(lambda: read_json("messages", many))).startswith("messages holds ")
    assert str(refused(lambda: parse(ChatRequest, body))).startswith("the body holds ")
