"""Text that grows token by token equals text decoded at once, and stop strings never leak."""

import json
import pickle
import random
import re
import sys
import threading
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.refused import code_and_field
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from hemiola.runtime.errors import Refused
from hemiola.runtime.stops import StopStrings
from hemiola.runtime.template import ChatTemplate
from hemiola.runtime.text import BROKEN, MOST_DOUBTFUL, Growing, Text
from hemiola.runtime.tokenizer import panics_as_errors, read_tokenizer

SAMPLE = "def foo(x):\n    return x + 1  # héllo wörld, 你好世界 😀👨‍👩‍👧 naïve\n"


def byte_level() -> Tokenizer:
    """As Qwen and Nemotron: a token may be part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>", "<bos>"]
    )
    tokenizer.train_from_iterator(["def return hello world"] * 9, trainer)
    return tokenizer


def sentence_piece() -> Tokenizer:
    """As Llama 2: words begin with a mark, bytes have tokens of their own."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    for piece in ("▁", "▁hello", "▁world", "h", "e", "l", "o", "w", "r", "d", "▁a", "b"):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer) -> Text:
    tokenizer.save(str(folder / "tokenizer.json"))
    return Text(folder)


@pytest.fixture
def text(tmp_path: Path) -> Text:
    return save(tmp_path, byte_level())


def grow(text: Text, prompt: Sequence[int], ids: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    growing = Growing(text, prompt, stop)
    pieces = []
    for token_id in ids:
        pieces.append(growing.push(token_id))
        if growing.stopped:
            break
    return [*pieces, growing.finish()]


def test_a_tokenizer_that_was_used_goes_to_no_other_process(text: Text) -> None:
    grow(text, [], [5])
    again = pickle.loads(pickle.dumps(text))
    assert again.encode("a b") == text.encode("a b") and grow(again, [], [5]) == grow(text, [], [5])


def test_every_piece_holds_whole_characters(text: Text) -> None:
    ids = text.encode(SAMPLE)
    assert len(ids) > len(SAMPLE), "the sample must have characters of several tokens"
    pieces = grow(text, text.encode("x = "), ids)
    assert "".join(pieces) == SAMPLE
    assert not any(BROKEN in piece for piece in pieces)


def test_text_comes_as_early_as_it_can(text: Text) -> None:
    pieces = grow(text, [], text.encode("ab 你 c"))
    assert pieces == ["a", "b", " ", "", "", "你", " ", "c", ""]


@pytest.mark.parametrize("seed", range(30))
def test_random_tokens_grow_into_what_they_decode_to(text: Text, seed: int) -> None:
    """Broken bytes included: what stands for an incomplete character may not come twice, or too early."""
    dice = random.Random(seed)
    high = [i for i in range(text.tokenizer.get_vocab_size()) if text.decode([i]) == BROKEN]
    pool = high if seed % 2 else list(range(text.tokenizer.get_vocab_size()))
    ids = dice.choices(pool, k=200)
    assert "".join(grow(text, [], ids)) == text.decode(ids)


def test_bytes_that_are_no_character_are_shown_before_the_end(text: Text) -> None:
    """Only what the next token may still complete is held back."""
    broken = next(i for i in range(text.tokenizer.get_vocab_size()) if text.decode([i]) == BROKEN)
    pieces = grow(text, [], [broken] * 9)
    assert pieces == [""] * 3 + [BROKEN] * 6 + [BROKEN * 3]


def test_characters_survive_a_prompt_that_ends_inside_one(text: Text) -> None:
    ids = text.encode("你好")
    assert "".join(grow(text, ids[:1], ids[1:])) == text.decode(ids[1:])


@pytest.mark.parametrize("words", ["hello world", " hello", "a b", "hello 你 b"])
def test_leading_spaces_stay(tmp_path: Path, words: str) -> None:
    text = save(tmp_path, sentence_piece())
    prompt, whole = text.encode("hello"), text.encode("hello " + words)
    assert "".join(grow(text, prompt, whole[len(prompt) :])) == " " + words


def test_a_special_token_eats_no_space(tmp_path: Path) -> None:
    tokenizer = sentence_piece()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    text = save(tmp_path, tokenizer)
    special, hello = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("▁hello")
    assert grow(text, [hello], [hello, special, hello, special, special, hello]) == [
        " hello", "", " hello", "", "", " hello", "",
    ]  # fmt: skip


def test_long_texts_keep_their_spaces(tmp_path: Path) -> None:
    """The window is cut many times; a decoder that strips the first space must not strip another."""
    text = save(tmp_path, sentence_piece())
    words = " ".join(["hello", "world", "ab", "a", "你", "b"] * 40)
    assert "".join(grow(text, [], text.encode(words))) == words


def test_the_window_stays_short(text: Text) -> None:
    growing = Growing(text, [], ())
    for token_id in text.encode(SAMPLE * 20):
        growing.push(token_id)
        assert len(growing._window) <= 8


def decoded_in_all(text: Text, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all that is decoded from now on."""
    sizes: list[int] = []
    decode = text.decode
    monkeypatch.setattr(text, "decode", lambda ids: sizes.append(len(ids)) or decode(ids))
    return sizes


def straddling(text: Text) -> list[int]:
    """Tokens that each end a character and begin the next, so that the text never ends with a whole one."""
    start, middle, end = (text.tokenizer.token_to_id(c) for c in "\u00e4\u00bd\u0142")  # the bytes of 你
    return [start, middle] + [end, start, middle] * 700


ENDLESS = {
    "broken": lambda text: [text.tokenizer.token_to_id("\u0142")] * 2000,
    "incomplete": lambda text: [text.tokenizer.token_to_id("\u00e4")] * 2000,
    "straddling": straddling,
    "special": lambda text: [text.tokenizer.token_to_id("<eos>")] * 2000,
    "unknown": lambda text: [10**6] * 2000,
    "words": lambda text: text.encode(SAMPLE * 30),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_the_work_for_a_token_does_not_grow_with_the_text(
    text: Text, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ENDLESS[kind](text)
    wanted = text.decode(ids)
    sizes = decoded_in_all(text, monkeypatch)
    assert "".join(grow(text, [], ids)) == wanted
    assert sum(sizes) <= 64 * len(ids)


@pytest.mark.parametrize("piece", ["▁", "<0xE4>", "<0xFF>"])
def test_the_work_for_a_byte_or_a_space_does_not_grow_with_the_text(
    tmp_path: Path, piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = save(tmp_path, sentence_piece())
    ids = [text.tokenizer.token_to_id(piece)] * 2000
    wanted = text.decode(ids)
    sizes = decoded_in_all(text, monkeypatch)
    assert "".join(grow(text, [], ids)) == wanted
    assert sum(sizes) <= 64 * len(ids)


@pytest.mark.parametrize("words", ["你好你好", "a你好b", "😀😀", "hello 你好世界 b", "你好" * 40])
def test_bytes_behind_bytes_are_no_broken_characters(tmp_path: Path, words: str) -> None:
    """Such a decoder takes the text of a character back while the next one is incomplete."""
    text = save(tmp_path, sentence_piece())
    prompt, whole = text.encode("hello"), text.encode("hello " + words)
    assert "".join(grow(text, prompt, whole[len(prompt) :])) == " " + words


def test_special_tokens_are_not_text(text: Text) -> None:
    eos = text.tokenizer.token_to_id("<eos>")
    ids = text.encode("hi")
    assert "".join(grow(text, [], [eos, *ids, eos, *ids, eos])) == "hihi"


STOPS = [
    ("hello STOP world", ["STOP"], "hello "),
    ("hello STO world", ["STOP"], "hello STO world"),
    ("hello STOP", ["STOP"], "hello "),
    ("hello STO", ["STOP"], "hello STO"),
    ("ababac", ["abac"], "ab"),
    ("aaaab", ["aaab"], "a"),
    ("one\n\ntwo", ["\n\n"], "one"),
    ("STOP", ["STOP"], ""),
    ("x你好y", ["好"], "x你"),
    ("abcdef", ["cde", "bc"], "a"),
    ("x return", ["urn", "et"], "x r"),  # one token that holds both
    ("abcdef", ["f", "zzz"], "abcde"),
]


@pytest.mark.parametrize(("whole", "stop", "wanted"), STOPS)
def test_stop_strings_cut_the_text_and_never_leak(
    text: Text, whole: str, stop: list[str], wanted: str
) -> None:
    shown = ""
    for piece in grow(text, [], text.encode(whole), stop):
        shown += piece
        assert wanted.startswith(shown), "showed a part of a stop string"
    assert shown == wanted


@pytest.mark.parametrize("seed", range(20))
def test_any_stop_strings_cut_where_the_first_of_them_begins(text: Text, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(50):
        whole = "".join(dice.choices("ab", k=40))
        stops = ["".join(dice.choices("ab", k=dice.randint(1, 9))) for _ in range(dice.randint(1, 4))]
        ends = [found.start() + len(s) for s in stops for found in re.finditer(f"(?={s})", whole)]
        end = min(ends, default=0)  # one token is one character
        begins = [end - len(s) for s in stops if end and whole[:end].endswith(s)]
        ids = [text.tokenizer.token_to_id(char) for char in whole]
        assert "".join(grow(text, [], ids, stops)) == whole[: min(begins, default=len(whole))]


def test_of_stop_strings_that_end_in_one_token_the_first_to_begin_counts() -> None:
    assert StopStrings(["bc", "abcd"]).push("xabcd") == 1
    assert StopStrings(["d", "bc"]).push("xabcd") == 2


def test_a_stop_string_that_may_not_stop_yet_holds_back_no_more_than_another_begins_with(text: Text) -> None:
    a, b, c = (text.tokenizer.token_to_id(char) for char in "abc")
    growing = Growing(text, [], ["ab", "bc"])
    assert [growing.push(a, may_stop=False), growing.push(b, may_stop=False)] == ["", "a"]
    assert growing.push(c) == "" and growing.stopped


def test_stop_strings_are_looked_for_once_in_each_character(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    step = StopStrings._step

    def counted(self: StopStrings, state: int, char: str) -> int:
        nonlocal steps
        steps += 1
        return step(self, state, char)

    stops = ["a" * 900 + str(n) for n in range(9)]
    ids = [text.tokenizer.token_to_id("a")] * 2000
    growing = Growing(text, [], stops)
    monkeypatch.setattr(StopStrings, "_step", counted)
    shown = "".join(growing.push(token_id) for token_id in ids)
    assert len(shown + growing.finish()) == steps == len(ids)
    assert len(shown) == len(ids) - 900, "what may begin a stop string"


def test_held_text_is_let_go_as_soon_as_no_stop_can_come(text: Text) -> None:
    assert grow(text, [], text.encode("ab ax"), ["abc"]) == ["", "", "ab ", "", "ax", ""]


def test_a_long_text_is_read_while_other_threads_run(text: Text) -> None:
    """Held up for longer, an engine would be taken for dead."""
    words, ticks, over = "def return " * 50_000, 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not over.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    ids = text.encode(words)
    seen = ticks
    over.set()
    thread.join()
    assert ids == text.tokenizer.encode(words).ids
    assert seen > 10, "half a second of reading"


def test_what_cannot_fit_is_refused_unread(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = max(map(len, text.tokenizer.get_vocab()))
    assert text.encode("x" * 1001 * longest, 1000), "it might have fitted"
    monkeypatch.setattr(text, "tokenizer", SimpleNamespace(to_str=text.tokenizer.to_str))
    with pytest.raises(
        Refused, match=r"^prompt is \d+ characters, and max_len=1000 tokens have at most \d+ each"
    ):
        text.encode("x" * (1001 * longest + 1), 1000)


SHRINKING = {
    "strip": (lambda t: setattr(t, "normalizer", normalizers.Strip()), " "),
    "replace": (lambda t: setattr(t, "normalizer", normalizers.Replace("x", "")), "x"),
    "compose": (lambda t: setattr(t, "normalizer", normalizers.NFC()), "\u0391\u0314\u0342\u0345"),
    "cut": (lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), t.pre_tokenizer])), " "),
    "removed": (lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), t.pre_tokenizer])), " "),
    "added_left": (lambda t: t.add_special_tokens([AddedToken("<m>", lstrip=True)]), " "),
    "added_right": (lambda t: t.add_special_tokens([AddedToken("<m>", rstrip=True)]), " "),
}  # fmt: skip


@pytest.mark.parametrize("how", SHRINKING)
def test_what_a_tokenizer_shortens_is_refused_by_its_length(tmp_path: Path, how: str) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["\u1f8f" * 20])  # eighty characters, decomposed
    change, word = SHRINKING[how]
    change(tokenizer)
    text = save(tmp_path, tokenizer)
    long = "<m>" + word * 20_000 if how == "added_right" else word * 20_000 + "<m>"
    ids = text.tokenizer.encode(long).ids
    assert len(long) > 20 * (len(ids) + 1), "no token is longer"
    assert text.encode(long, len(ids)) == ids


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_a_composed_character_is_at_most_four(form: str) -> None:
    whole = {unicodedata.normalize(form, chr(code)) for code in range(sys.maxunicode + 1)}
    kept = [c for c in whole if len(c) == 1]
    assert max(len(unicodedata.normalize("NFD", c)) for c in kept) == 4


def test_lone_surrogates_are_refused(text: Text) -> None:
    with pytest.raises(Refused, match="not valid Unicode at character 2"):
        text.encode("ab\udcff")


def test_a_text_with_its_own_bos_gets_no_second(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_level()
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True)])
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    (tmp_path / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<bos>"}, "add_bos_token": true}'
    )
    text = save(tmp_path, tokenizer)
    assert text.encode("a")[:1] == [bos] and text.encode("<bos>a") == text.encode("a")


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé <b>"}]


def with_template(folder: Path, template: str) -> Text:
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}')
    return save(folder, byte_level())


def test_chat_template_as_hugging_face_renders_it(tmp_path: Path) -> None:
    template = """{{ bos_token }}{% for m in messages %}
        {%- if m.role not in ["system", "user", "assistant"] %}{{ raise_exception("odd") }}{% endif %}
        {%- if loop.index > 5 %}{% break %}{% endif %}
{{ m.role }}: {{ m.content | tojson }}
    {% endfor %}
    {% generation %}x{% endgeneration %}{% if add_generation_prompt %}assistant: {% endif %}
{{ strftime_now("%Y") | length }}{{ tools is none }}"""
    from transformers.utils.chat_template_utils import render_jinja_template

    text = with_template(tmp_path, template)
    wanted, _ = render_jinja_template(
        conversations=[MESSAGES],
        chat_template=template,
        add_generation_prompt=True,
        bos_token="<bos>",
        eos_token="<eos>",
    )
    assert text.chat(MESSAGES) == wanted[0]


def test_variables_of_a_template_are_what_it_reads(tmp_path: Path) -> None:
    template = """{% set on = on if on is defined else true %}{% macro f(x, y=z) %}{{ x }}{% endmacro %}
        {%- for m in messages %}{% set own = namespace(a=1) %}{{ own.a }}{{ loop.index }}{% endfor %}
        {%- if off is defined and off is false %}{{ raise_exception(strftime_now("%Y")) }}{% endif %}"""
    assert with_template(tmp_path, template).variables == {"messages", "on", "off", "z"}


def test_a_template_with_a_number_of_5000_digits_is_a_traceback(tmp_path: Path) -> None:
    text = with_template(tmp_path, "{{ " + "1" * 5000 + " }}")
    assert text.variables == frozenset()
    with pytest.raises(Refused, match="the chat template does not fit"):
        text.chat(MESSAGES)


GENERIC = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
CONTENT = "{{ messages[0].content }}"
UNREADABLE = [[{"type": "image"}], 5, {"text": "a"}, b"a"]  # contents that Python would spell
BAD_CHATS = [
    (GENERIC, [{"content": "x"}], "missing", "messages"),
    (GENERIC, ["x"], "missing", "messages"),
    (GENERIC, [{"role": 1, "content": "x"}], "missing", "messages"),
    *[(CONTENT, [{"role": "user", "content": x}], "wrong_type", "messages[0].content") for x in UNREADABLE],
    ("{{ messages.__class__.__mro__[1].__subclasses__() }}", MESSAGES, "unsupported", "messages"),
    (None, MESSAGES, "unsupported", "messages"),
]


@pytest.mark.parametrize(("template", "messages", "code", "field"), BAD_CHATS)
def test_bad_chats_are_refused(
    tmp_path: Path, text: Text, template: str | None, messages: Any, code: str, field: str
) -> None:
    asked = text if template is None else with_template(tmp_path, template)
    assert code_and_field(lambda: asked.chat(messages)) == (code, field)


def test_what_a_template_says_of_messages_is_passed_on(tmp_path: Path) -> None:
    text = with_template(tmp_path, "{{ raise_exception('no ' + messages[0].role) }}")
    with pytest.raises(Refused, match="refuses these messages: no user"):
        text.chat([{"role": "user", "content": "x"}])


TALK = (
    "{% for m in messages %}{% if m.role != 'tool' or x %}{{ m.role + m.content }}"
    "{% for c in m.tool_calls if m.role == 'assistant' %}{{ c.function.name }}{% endfor %}"
    "{% endif %}{% endfor %}"
)
CALLS = {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("template", "message", "lost"),
    [
        (GENERIC, {"role": "assistant"} | CALLS, "tool_calls"),
        (TALK, {"role": "user"} | CALLS, "tool_calls"),
        (TALK, {"role": "assistant"} | CALLS, None),
        (GENERIC, {"role": "tool", "content": "sun", "tool_call_id": "1", "name": "f"}, None),
        ("{{ messages[0].content }}", {"role": "tool", "content": "sun"}, "content"),
        (GENERIC, {"role": "user", "content": "a", "colour": "red"}, "colour"),
        (GENERIC, {"role": "user", "content": "a", "colour": None}, None),
        ("{{ messages | tojson }}", {"role": "user", "content": "a", "colour": "red"}, None),
        (GENERIC, {"role": "assistant", "content": "a", "reasoning_content": "hm"}, None),
    ],
)
def test_no_part_of_a_message_vanishes(
    tmp_path: Path, template: str, message: dict, lost: str | None
) -> None:
    text = with_template(tmp_path, template)
    if lost is None:
        assert text.chat([*MESSAGES, message])
        return
    with pytest.raises(Refused, match=rf"messages\[2\].{lost} changes nothing: .* {message['role']}; take"):
        text.chat([*MESSAGES, message, message])


def test_a_name_in_a_message_comes_into_an_error_as_it_is(tmp_path: Path) -> None:
    """A lone surrogate there could not be sent: the caller was never answered."""
    text = with_template(tmp_path, GENERIC)
    for name in ("\ud800", "x\nE1127 fake", "x" * 10**6):
        with pytest.raises(Refused) as caught:
            text.chat([{"role": "user", "content": "a", name: 1}])
        for said in (str(caught.value), caught.value.field):
            assert said.isprintable() and len(said.encode()) < 400
    hidden = with_template(tmp_path, "{{ messages[0].content }}")
    with pytest.raises(Refused, match="changes nothing") as caught:
        hidden.chat([{"role": "user", "content": "a"}, {"role": "\ud800\n" * 10**5, "content": "b"}])
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_a_conversation_is_rendered_once_for_each_of_its_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand messages, each with a role of its own, took 25 s."""
    renders, render = [], ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda *args: renders.append(args) or render(*args))
    text = with_template(tmp_path, GENERIC)
    few = [{"role": f"r{i}", "content": "a"} for i in range(MOST_DOUBTFUL)]
    assert text.chat(few * 3)
    with pytest.raises(Refused, match=f"more than {MOST_DOUBTFUL} .* use fewer") as caught:
        text.chat([{"role": f"r{i}", "content": "a"} for i in range(5000)])
    assert (caught.value.code, caught.value.field) == ("too_long", "messages")
    assert len(renders) == 2 * (1 + MOST_DOUBTFUL)


def test_a_role_is_compiled_as_a_pattern_however_long_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """15 MB of it took gigabytes."""
    patterns, search = [], re.search
    monkeypatch.setattr(
        re, "search", lambda pattern, *rest: patterns.append(pattern) or search(pattern, *rest)
    )
    text = with_template(tmp_path, GENERIC)
    assert text.chat([{"role": "r" * 10**6, "content": "a"}])
    assert max(map(len, patterns), default=0) < 1000


def test_marks_of_calls_stay_in_the_text_though_they_are_special_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<tool_call>", "<other>"])
    text = save(tmp_path, tokenizer)
    ids = text.encode("a<tool_call><other><eos>b")
    assert len(ids) == 5
    assert text.decode(ids) == "a<tool_call>b"


class Panic(BaseException):
    """As the tokenizers library raises them, by its Rust."""


Panic.__module__ = "pyo3_runtime"


def test_a_text_on_which_the_library_panics_passes_everybody_who_answers_for_errors(
    tmp_path: Path,
) -> None:
    tokenizer = byte_level()
    endless = pre_tokenizers.Split(Regex("((a|h|e|l|l|o| )+)+x"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([endless, tokenizer.pre_tokenizer])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = Text(tmp_path)
    for words in ("hello a" * 9, "hello a" * 9000):
        with pytest.raises(Refused, match="the engine's tokenizer fails on this text"):
            text.encode(words)
    assert text.encode("def")


def test_only_panics_become_errors() -> None:
    for given, seen in ((Panic("it broke\nhere"), RuntimeError), (KeyboardInterrupt(), KeyboardInterrupt)):
        with pytest.raises(seen), panics_as_errors():
            raise given


def test_a_tokenizer_that_panics_when_it_is_read_is_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    byte_level().save(str(path))
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": normalizer}))
    with pytest.raises(RuntimeError, match="Precompiled"):
        read_tokenizer(path)
