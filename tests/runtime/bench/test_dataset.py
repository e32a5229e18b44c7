"""Files of prompts: what each form asks, and where the bad line is."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from kit.refused import refused

from hemiola.runtime.bench.dataset import read_entries, read_sessions
from hemiola.runtime.bench.workloads import Turn
from hemiola.runtime.errors import Refused


class Words:
    """One token per character; a chat is its roles and contents."""

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str) and "\ud800" in prompt:
            raise Refused("other", message="prompt is not valid Unicode; remove it")
        return [ord(c) for c in prompt] if isinstance(prompt, str) else list(prompt)

    def chat_text(self, messages: Sequence[Mapping[str, object]]) -> str:
        if messages[0]["role"] == "wizard":
            raise Refused("other", message="the chat template refuses these messages; change them")
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., list[Turn]]:
    def write_and_read(*lines: object, count: int | None = None, max_tokens: int = 7) -> list[Turn]:
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        sessions = read_sessions(read_entries(path, count), max_tokens, Words())
        return [turn for session in sessions for turn in session]

    return write_and_read


def text(turn: Turn) -> str:
    return "".join(map(chr, turn.ids))


def test_prompts_are_text_or_ids(read: Callable[..., list[Turn]]) -> None:
    turns = read({"prompt": "ab"}, "", {"prompt": [3, 1], "max_tokens": 5})
    assert [(turn.ids, turn.max_tokens) for turn in turns] == [([97, 98], 7), ([3, 1], 5)]
    assert [turn.origin.rsplit("/")[-1] for turn in turns] == ["data.jsonl:1", "data.jsonl:3"]


def test_messages_go_through_the_template_without_their_last_answer(read: Callable[..., list[Turn]]) -> None:
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    open_end, answered, limited = read(
        {"messages": said},
        {"messages": [*said, {"role": "assistant", "content": "four"}]},
        {"messages": [*said, {"role": "assistant", "content": "four"}], "max_tokens": 9},
    )
    assert text(open_end) == text(answered) == text(limited) == "<user>a<assistant>b<user>c"
    assert [open_end.max_tokens, answered.max_tokens, limited.max_tokens] == [7, 4, 9]


def test_a_conversation_asks_its_first_human_words_for_as_many_tokens_as_the_answer(
    read: Callable[..., list[Turn]],
) -> None:
    [turn, alone, spoken_over] = read(
        {"id": "x", "conversations": [
            {"from": "system", "value": "s"}, {"from": "human", "value": "hi"},
            {"from": "gpt", "value": "hello"}, {"from": "human", "value": "more"},
        ]},
        {"conversations": [{"from": "human", "value": "hi"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "human", "value": "hello?"}]},
    )  # fmt: skip
    assert (text(turn), turn.max_tokens) == ("hi", 5)
    assert (text(alone), alone.max_tokens) == ("hi", 7)
    assert (text(spoken_over), spoken_over.max_tokens) == ("hi", 7)


def test_a_file_may_be_one_list(read: Callable[..., list[Turn]]) -> None:
    turns = read(json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=1))
    assert [text(turn) for turn in turns] == ["a", "b"] and turns[1].origin.endswith("data.jsonl[1]")


def test_lines_after_those_asked_for_are_not_looked_at(read: Callable[..., list[Turn]]) -> None:
    assert [text(turn) for turn in read({"prompt": "a"}, {"prompt": "b"}, "not JSON", count=2)] == ["a", "b"]


def test_line_separators_inside_a_string_do_not_end_a_line(read: Callable[..., list[Turn]]) -> None:
    line = json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False)
    assert [text(turn) for turn in read(line)] == ["a\u2028b\x85c"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a",}', ["not JSON at column", '{"prompt": "a",}', 'write {"prompt"']),
        ("17", ["is 17, not an object", "write"]),
        ({}, ["has none of prompt, messages and conversations: {}", "write"]),
        ({"prompt": "a", "messages": []}, ["has prompt and messages", "write"]),
        ({"prompt": ""}, ["prompt is '', no tokens", "remove the line"]),
        ({"prompt": []}, ["prompt is [], no tokens"]),
        ({"prompt": 3.5}, ["prompt is 3.5", "give text or a list of token ids"]),
        ({"prompt": [1, "2"]}, ['prompt is [1, "2"]', "token ids"]),
        ({"prompt": [True]}, ["prompt is [true]", "token ids"]),
        ({"prompt": "a", "max_tokens": 0}, ["max_tokens is 0", "at least 1", "correct it"]),
        ({"prompt": "a", "max_tokens": "5"}, ["max_tokens is '5'", "integer"]),
        ({"prompt": "a", "max_tokens": True}, ["max_tokens is true"]),
        ({"prompt": "a", "max_tokens": 2.0}, ["max_tokens is 2.0"]),
        ({"prompt": "\ud800"}, ["not valid Unicode"]),
        ({"messages": []}, ["messages is []", "give a list"]),
        ({"messages": "hi"}, ["messages is 'hi'"]),
        ({"messages": [{"role": "user"}]}, ['messages holds {"role": "user"}', "content"]),
        (
            {"messages": [{"role": "assistant", "content": "b"}]},
            ["holds an answer only", "add what was asked"],
        ),
        ({"messages": [{"role": "wizard", "content": "b"}]}, ["the chat template refuses"]),
        ({"conversations": [{"from": "human"}]}, ['conversations holds {"from": "human"}', "value"]),
        ({"conversations": [{"from": "human", "value": 4}]}, ["conversations holds"]),
        ({"conversations": [{"from": "gpt", "value": "b"}]}, ["nothing from a human", "remove the line"]),
        ({"prompt": {"long": "x" * 500}}, ["...", "give text"]),
    ],
)
def test_a_bad_line_is_named_with_its_place_value_and_way_out(
    read: Callable[..., list[Turn]], line: object, words: list[str]
) -> None:
    with pytest.raises(Refused) as caught:
        read({"prompt": "good"}, line)
    message = str(caught.value)
    assert "data.jsonl:2" in message and "\n" not in message and len(message) < 400
    for word in words:
        assert word in message


def test_a_list_with_a_syntax_error_names_the_line(read: Callable[..., list[Turn]]) -> None:
    with pytest.raises(Refused, match=r"data.jsonl is not JSON at line 2 column"):
        read('[{"prompt": "a"},\n {"prompt" "b"}]')


def test_files_that_hold_too_little_are_refused(read: Callable[..., list[Turn]], tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    calls: list[tuple[Callable[[], object], str, str, str]] = [
        (lambda: read("\n\n"), "out_of_range", "num_requests", "no requests; write"),
        (lambda: read({"prompt": "a"}, count=2), "out_of_range", "num_requests", "holds 1 requests"),
        (lambda: read_entries(tmp_path / "absent", None), "not_found", "workload", "absent: No such file"),
        (lambda: read_entries(tmp_path / "latin", None), "malformed", "", "latin is not UTF-8 at byte 12"),
    ]
    for call, code, field, said in calls:
        error = refused(call)
        assert (error.code, error.field) == (code, field) and said in str(error), error
