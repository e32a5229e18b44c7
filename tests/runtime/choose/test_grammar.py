"""Which tokens a grammar allows: every token of a vocabulary is tried by another library, at every place."""

import codecs
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn
from unittest.mock import Mock

import numpy as np
import pytest
from kit.fake_session import VOCAB
from kit.frames import kept_by
from kit.guided import ASKED, EOS, TEXTS, allowed, compiled, grammars, text_of, tokenizer
from tokenizers import Tokenizer, models

from hemiola.runtime.api import SamplingParams, StructuredOutputsParams
from hemiola.runtime.choose import grammar as module
from hemiola.runtime.choose.grammar import Grammar, Grammars, Guide, Stuck
from hemiola.runtime.errors import Busy, Refused
from hemiola.runtime.schedule.request import Bounds, new_request

BOUNDS = Bounds(100, 100, VOCAB, eos_ids=(EOS,))
PROMPT = [5, 6, 7]


def ids_of(bits: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


def a_guide(grammar: str | Grammar, bounds: Bounds = BOUNDS, **params: object) -> Guide:
    """By a pattern of ASKED, or any other."""
    if isinstance(grammar, str):
        grammar = compiled(grammar)
    request = new_request(1, PROMPT, SamplingParams(**params), bounds, grammar=grammar)
    assert request.guide is not None
    return request.guide


def walk(dice: random.Random, may: Callable[[list[int]], list[int]], most: int = 30) -> list[int]:
    """Tokens that are allowed, one by one, up to an end."""
    output: list[int] = []
    while len(output) < most and output[-1:] != [EOS]:
        output.append(dice.choice(may(output)))
    return output


def follow(guide: Guide, output: Sequence[int], drafts: Sequence[int] = ()) -> int:
    return guide.follow(np.array([*PROMPT, *output], np.int32), drafts)


@pytest.mark.parametrize("pattern", ASKED)
@pytest.mark.parametrize("seed", range(3))
def test_every_token_that_fits_is_allowed_and_no_other(pattern: str, seed: int) -> None:
    print("seed", seed)
    guide = a_guide(pattern)

    def may(output: list[int]) -> list[int]:
        follow(guide, output)
        found = ids_of(guide.masks[0])
        assert found == allowed(pattern, text_of(output)), f"behind {text_of(output)!r}"
        return found

    walk(random.Random(seed), may)


@pytest.mark.parametrize("pattern", ASKED)
def test_masks_behind_drafts_are_those_of_the_text_with_them(pattern: str) -> None:
    dice = random.Random(pattern)
    guide, done = a_guide(pattern), 0
    text = walk(dice, lambda output: allowed(pattern, text_of(output)))
    while done < len(text) - 1:
        good = text[done : done + dice.randint(0, 6)]
        bad = [dice.randrange(VOCAB) for _ in range(dice.randint(0, 3))]
        kept = follow(guide, text[:done], good + bad)
        own = [draft for draft in good if draft != EOS]  # an end is chosen, never drafted
        assert kept >= len(own)
        for at, bits in enumerate(guide.masks):
            known = text[:done] + (good + bad)[:at]
            assert ids_of(bits) == allowed(pattern, text_of(known)), (
                f"{at} drafts behind {text_of(text[:done])!r}"
            )
        if kept < len(good + bad):
            refused = (good + bad)[kept]
            assert refused == EOS or refused not in ids_of(guide.masks[-1])
        done += dice.randint(1, max(1, len(own)))


def test_parts_of_characters_are_tokens_like_any_other(tiny_checkpoint: Callable[[str], Path]) -> None:
    found = Tokenizer.from_file(str(tiny_checkpoint("qwen3_5") / "tokenizer.json"))
    size = found.get_vocab_size()
    visible = {code: chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256)]}
    hidden = [code for code in range(256) if code not in visible]
    codes = {text: code for code, text in visible.items()} | {chr(256 + n): c for n, c in enumerate(hidden)}
    spelt = [found.id_to_token(i) for i in range(size)]
    special = found.get_added_tokens_decoder()
    parts = [b"" if i in special else bytes(codes[char] for char in spelt[i]) for i in range(size)]
    choices = ["é😀", "日本語", "日本", "e"]

    def of_choices(text: bytes) -> bool:
        return any(choice.encode().startswith(text) for choice in choices)

    def of_three_characters(text: bytes) -> bool:
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            whole = decoder.decode(text)
        except UnicodeDecodeError:
            return False
        return len(whole) + bool(decoder.getstate()[0]) <= 3 and "\n" not in whole

    bounds = BOUNDS._replace(vocab_size=size, eos_ids=(0,))
    asked = {"choice": choices}, {"regex": ".{2,3}"}
    for own, fits in zip(asked, (of_choices, of_three_characters), strict=True):
        made = Grammars(found, size).compile(StructuredOutputsParams(**own))
        for seed in range(4):
            dice, output, text = random.Random(seed), list[int](), b""
            guide = a_guide(made, bounds)
            while output[-1:] != [0]:
                follow(guide, output)
                may = [i for i in ids_of(guide.masks[0]) if i != 0]
                assert may == [i for i, part in enumerate(parts) if part and fits(text + part)], text
                output.append(dice.choice(ids_of(guide.masks[0])))
                text += parts[output[-1]]
            assert text.decode() in choices or 2 <= len(text.decode()) <= 3


def test_a_grammar_may_call_itself() -> None:
    rules = 'root ::= "(" root* ")"'.replace("(", "{", 1).replace('")"', '"}"').replace('"("', '"{"')
    made = grammars().compile(StructuredOutputsParams(grammar=rules))
    guide = a_guide(made)
    output, depth = [], 0
    for seed in range(40):
        follow(guide, output)
        may = {TEXTS[i] if i != EOS else "" for i in ids_of(guide.masks[0])}
        assert may == ({"{"} if not output else {"{", "}"} if depth else {""}), output
        if not depth and output:
            break
        text = random.Random(seed).choice(sorted(may))
        depth += 1 if text == "{" else -1
        output.append(TEXTS.index(text))


BAD = {
    "open class": ({"regex": "[0-9"}, "unclosed character class"),
    "look-ahead": ({"regex": "a(?=b)"}, "look-around"),
    "back reference": ({"regex": r"(a)\1"}, "backreferences"),
    "word boundary": ({"regex": r"\bfoo"}, "lookarounds"),
    "empty class": ({"regex": r"[^\s\S]"}, "no text fits it"),
    "nested regex": ({"regex": "(" * 5000 + ")" * 5000}, "invalid regex"),
    "long regex": ({"regex": "x" * 300_000}, "300012 characters are too many, the limit is 262144"),
    "false": ({"json": False}, "schema is false"),
    "unknown type": ({"json": {"type": "thing"}}, "Invalid type: thing"),
    "unknown key": ({"json": {"not": {}}}, 'Unimplemented keys: ["not"]'),
    "unknown format": ({"json": {"type": "string", "format": "nope"}}, "Unknown format: nope"),
    "far away": ({"json": {"$ref": "http://localhost/x"}}, "not fetch resources"),
    "of itself": ({"json": {"$ref": "#"}}, "no text fits it"),
    "nobody fits": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater"),
    "nested schema": ({"json": '{"items":' * 300 + "{}" + "}" * 300}, "recursion limit exceeded"),
    "explodes": (
        {
            "json": {
                "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(30)]
            }
        },
        "schema too large",
    ),
    "no grammar": ({"grammar": "foo"}, "no GBNF (Expected ::="),
    "no start": ({"grammar": 'foo ::= "a"'}, "No 'root' rule found"),
    "no rule": ({"grammar": 'root ::= "a" | x'}, "Rule 'x' not found"),
    "open text": ({"grammar": 'root ::= "a'}, "Unexpected end of input"),
    "no rule of Lark": ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    "only itself": ({"grammar": "start: start"}, "no text fits it"),
    "no such token": ({"grammar": "start: <|nope|>"}, 'unknown special token: "<|nope|>"'),
    "nested rules": ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "nested too deeply"),
    "nested Lark": ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "too deeply nested"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_grammar_is_refused_and_the_next_one_works(name: str) -> None:
    asked, reason = BAD[name]
    for _ in range(2):  # the second answer comes from memory
        with pytest.raises(Refused) as caught:
            grammars().compile(StructuredOutputsParams(**asked))
        message = str(caught.value)
        assert message.startswith("structured_outputs: ") and reason in message, message
        assert "\n" not in message and len(message) < 500
    assert grammars().compile(StructuredOutputsParams(regex="a"))


def test_no_text_fits_a_grammar_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMITS", module.LLParserLimits(step_lexer_fuel=9))
    vocabulary = grammars()._make_vocabulary()
    with pytest.raises(Refused, match=r"^it is too large \(.*; simplify it$") as refused:
        module.compile_grammar(vocabulary, StructuredOutputsParams(regex="([ab]{1,9}c){1,9}"))
    assert refused.value.code == "too_long"


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"min_tokens": 2}, "min_tokens and bad words leave no token"),
        (
            {"bad_words_ids": [[TEXTS.index("a")], [TEXTS.index("ab")]]},
            "min_tokens and bad words leave no token",
        ),
        ({"ignore_eos": True}, "no token ends this request"),
    ],
)
def test_options_that_contradict_the_grammar_are_refused_where_it_begins(params: dict, reason: str) -> None:
    asked = {"min_tokens": "", "bad_words_ids": "ab", "ignore_eos": "ab"}[next(iter(params))]
    made = grammars().compile(StructuredOutputsParams(regex=asked))
    with pytest.raises(Refused, match=reason):
        new_request(1, PROMPT, SamplingParams(**params), BOUNDS, grammar=made)


def test_a_stop_id_of_the_request_ends_a_whole_text_and_the_end_token_no_longer_does() -> None:
    stop = len(TEXTS)  # stands for nothing
    guide = a_guide("yes|no|maybe|yesterday", stop_token_ids=[stop], ignore_eos=True)
    follow(guide, [TEXTS.index("no")])
    assert ids_of(guide.masks[0]) == [stop]


def test_what_explodes_later_says_so() -> None:
    rules = 'start: s\ns: s s s | s s | "a" |'
    made = grammars().compile(StructuredOutputsParams(grammar=rules))
    guide = a_guide(made)
    with pytest.raises(Stuck, match="max is"):
        for length in range(1000):
            follow(guide, [0] * length)
    assert follow(a_guide(made), [0]) == 0, "requests of one grammar share nothing"


def test_a_text_that_its_parser_gives_up_is_read_again_while_all_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By every answer of a request, in one step: four of 332 tokens held the loop up for 5.7 s."""
    made = grammars().compile(StructuredOutputsParams(grammar='start: e\ne: e "a" e | "a" | e "a"'))
    guide, a = a_guide(made), TEXTS.index("a")
    monkeypatch.setattr(Guide, "_copy_another", lambda own: pytest.fail("all of it is read again"))
    with pytest.raises(Stuck, match="max is"):
        for length in range(1000):
            follow(guide, [a] * length)
    with pytest.raises(Refused, match="the output so far does not fit"):
        new_request(1, PROMPT, SamplingParams(max_tokens=80), BOUNDS, grammar=made, output_ids=[a, a + 1])


def test_a_request_that_uses_up_the_lexer_costs_no_other_request_of_the_same_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = module.LLParserLimits(max_lexer_states=500, verbose_errors=False)
    monkeypatch.setattr(module, "LIMITS", limits)
    made = Grammars(tokenizer(), VOCAB).compile(StructuredOutputsParams(regex="[ab]*a[ab]{16}"))
    dice, bounds = random.Random(1), BOUNDS._replace(max_len=5000)

    def read(output: list[int]) -> None:
        guide = a_guide(made, bounds, max_tokens=4000)
        for length in range(len(output) + 1):
            follow(guide, output[:length])

    with pytest.raises(Stuck, match="too many states"):
        read(dice.choices(range(2), k=3000))
    read(dice.choices(range(2), k=100))
    read([0] * 100)


def test_every_request_parses_a_grammar_again_whose_lexer_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loop's thread: 120 KB of a schema took each and so all others a quarter of a second."""
    limits = module.LLParserLimits(max_lexer_states=2000, verbose_errors=False)
    monkeypatch.setattr(module, "LIMITS", limits)
    made = Grammars(tokenizer(), VOCAB).compile(StructuredOutputsParams(regex="[ab]*a[ab]{16}"))
    dice, bounds, parse, parsed = random.Random(1), BOUNDS._replace(max_len=5000), module._matcher, []
    monkeypatch.setattr(module, "_matcher", lambda *given: (parsed.append(1), parse(*given))[1])
    before = [a_guide(made, bounds, max_tokens=4000) for _ in range(6)]
    first, output = a_guide(made, bounds, max_tokens=4000), []
    while not parsed:
        follow(first, output)
        output.append(dice.randrange(2))
    for guide in (*before, *(a_guide(made, bounds, max_tokens=4000) for _ in range(6))):
        for length in range(10):
            follow(guide, output[:length])
    assert len(parsed) < 4


def test_an_output_does_not_fit_a_grammar_whose_lexer_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request was to go on here, and was refused as if it asked for what cannot be."""
    limits = module.LLParserLimits(max_lexer_states=2000, verbose_errors=False)
    monkeypatch.setattr(module, "LIMITS", limits)
    made = Grammars(tokenizer(), VOCAB).compile(StructuredOutputsParams(regex="[ab]*a[ab]{16}"))
    dice, reader = random.Random(1), made.matcher.deep_copy()
    while not reader.is_error():
        reader.consume_token(dice.randrange(2))
    params, output = SamplingParams(max_tokens=80), dice.choices(range(2), k=50)
    request = new_request(1, PROMPT, params, BOUNDS, grammar=made, output_ids=output)
    assert request.guide is not None and len(request.guide.masks) == 1
    with pytest.raises(Refused, match="the output so far does not fit"):
        new_request(2, PROMPT, params, BOUNDS, grammar=made, output_ids=[*output, TEXTS.index("c")])


def test_all_wait_while_a_parser_reads_what_another_engine_said() -> None:
    """A call of the library holds Python's lock."""
    guide = Guide(compiled("a*b"), 0, frozenset({EOS}), lambda output: np.empty(0, np.int32))
    guide._matcher = reader = Mock(wraps=guide._matcher)
    reader.is_error.return_value = False
    guide.resume([TEXTS.index("a")] * 1000)
    parts = [len(call.args[0]) for call in reader.consume_tokens.call_args_list]
    assert sum(parts) == 1000 and max(parts) < 500


def test_all_wait_while_the_texts_of_a_dear_grammar_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all who shared a lexer, in one step: 16,000 tokens took 4 s, for each of them."""
    limits = module.LLParserLimits(max_lexer_states=500, verbose_errors=False)
    monkeypatch.setattr(module, "LIMITS", limits)
    monkeypatch.setattr(module, "MOST_AGAIN_S", -1.0)
    made = Grammars(tokenizer(), VOCAB).compile(StructuredOutputsParams(regex="[ab]*a[ab]{16}"))
    guide, output, dice = a_guide(made, BOUNDS._replace(max_len=5000), max_tokens=4000), [], random.Random(1)
    with pytest.raises(Stuck, match="again takes more than -1 s"):
        while True:
            follow(guide, output)
            output.append(dice.randrange(2))


def test_a_draft_behind_which_nothing_goes_on_is_dropped() -> None:
    made = grammars().compile(StructuredOutputsParams(grammar='start: "a" x | "a" "b" "c"\nx: x "d"'))
    guide = a_guide(made, bad_words_ids=[[2]])
    a, b, c = (TEXTS.index(text) for text in "abc")
    assert follow(guide, [], [a, b, c]) == 1, "behind b only c fits, a bad word"
    assert follow(guide, [a], [b]) == 0
    with pytest.raises(Stuck, match="bad words leave no token"):
        follow(guide, [a, b])


def test_drafts_take_longer_with_each_token_of_the_output() -> None:
    class Output(list[int]):
        def __iter__(self) -> NoReturn:
            raise AssertionError("all of it is read")

    guide, a = a_guide("a*b"), TEXTS.index("a")
    guide._output = Output()
    for n in range(3):
        assert follow(guide, [a] * n, [a, a, EOS]) == 2 and len(guide._output) == n


def test_drafts_copy_all_that_the_parser_knows_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In each step: 6 ms behind 80,000 tokens of JSON, 42 ms behind 14,000 of a dear grammar."""
    guide, a = a_guide("a*b"), TEXTS.index("a")
    assert [follow(guide, [a] * n, [a, a]) for n in range(20)] == [2] * 20
    monkeypatch.setattr(module, "MOST_COPY_S", -1.0, raising=False)
    kept = [follow(guide, [a] * n, [a, a]) for n in range(20, 40)]
    assert kept == [2] * 8 + [0] * 12 and len(guide.masks) == 1


def test_a_token_that_the_grammar_forbids_is_never_read_on() -> None:
    guide = a_guide("yes|no|maybe|yesterday")
    with pytest.raises(Stuck, match=f"token {TEXTS.index('x')} does not fit"):
        follow(guide, [TEXTS.index("x")])


def test_tokens_beyond_the_engines_logits_are_never_allowed() -> None:
    small = Grammars(tokenizer(), vocab_size=40)  # the tokenizer knows more
    large = Grammars(tokenizer(), vocab_size=200)  # ids that pad a vocabulary
    for made, most in ((small, 40), (large, VOCAB)):
        grammar = made.compile(StructuredOutputsParams(regex="(?s).*"))
        found = ids_of(a_guide(grammar, BOUNDS._replace(eos_ids=(3,))).masks[0])
        assert found == list(range(min(most, len(TEXTS))))


def test_a_grammar_that_takes_too_long_is_refused_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, compiling, refused = Grammars(tokenizer(), VOCAB), module.to_lark, threading.Event()

    def to_lark(asked: StructuredOutputsParams) -> str:
        assert asked.regex != "slow" or refused.wait(60)
        return compiling(asked)

    monkeypatch.setattr(module, "to_lark", to_lark)
    monkeypatch.setattr(module, "MOST_SECONDS", 0.2)
    with pytest.raises(Refused, match="not compiled within"):
        slow.compile(StructuredOutputsParams(regex="slow"))
    refused.set()
    monkeypatch.setattr(module, "MOST_SECONDS", 60.0)
    assert slow.compile(StructuredOutputsParams(regex="fast"))


def test_a_grammar_that_waited_for_others_is_called_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    made, compiling, go_on = Grammars(tokenizer(), VOCAB), module.to_lark, threading.Event()
    begun = threading.Semaphore(0)

    def to_lark(asked: StructuredOutputsParams) -> str:
        begun.release()
        assert go_on.wait(300)
        return compiling(asked)

    made.compile(StructuredOutputsParams(regex="a"))
    monkeypatch.setattr(module, "to_lark", to_lark)
    others = [
        made._compiling(made._vocabulary.result(), StructuredOutputsParams(regex=text)) for text in "bc"
    ]
    for _ in others:
        begun.acquire()
    monkeypatch.setattr(module, "MOST_SECONDS", 0.2)
    with pytest.raises(Busy, match="grammars of other requests took"):
        made.compile(StructuredOutputsParams(regex="d"))
    go_on.set()
    monkeypatch.setattr(module, "MOST_SECONDS", 300.0)
    assert made.compile(StructuredOutputsParams(regex="d")), "it may be sent again"


def test_who_gives_up_takes_the_grammar_from_those_who_came_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """They had waited for a moment, and heard that other grammars took all of their time."""
    made, compiling, go_on = Grammars(tokenizer(), VOCAB), module.to_lark, threading.Event()
    joined, found = threading.Event(), SimpleQueue()

    def to_lark(asked: StructuredOutputsParams) -> str:
        assert go_on.wait(300)
        return compiling(asked)

    made.compile(StructuredOutputsParams(regex="a"))
    monkeypatch.setattr(module, "to_lark", to_lark)
    for text in "bc":
        made._compiling(made._vocabulary.result(), StructuredOutputsParams(regex=text))
    monkeypatch.setattr(module, "MOST_SECONDS", 300.0)
    join = made._compiling

    def join_and_tell(*given: object) -> object:
        future = join(*given)
        joined.set()
        return future

    monkeypatch.setattr(made, "_compiling", join_and_tell)

    def ask() -> None:
        try:
            found.put(made.compile(StructuredOutputsParams(regex="d")))
        except Exception as error:
            found.put(error)

    later = threading.Thread(target=ask)
    later.start()
    assert joined.wait(300)
    monkeypatch.setattr(module, "MOST_SECONDS", 0.2)
    with pytest.raises(Busy, match="grammars of other requests took"):
        made.compile(StructuredOutputsParams(regex="d"))
    go_on.set()
    later.join(300)
    assert isinstance(found.get(), Grammar)
    made.close()


def test_the_limit_of_a_grammar_begins_behind_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first waited for that without a limit, and then as long as it may for its own compiling."""
    refused, plain, in_time = threading.Event(), module.make_vocabulary, []

    def slow(*given: object) -> object:
        in_time.append(refused.wait(30))
        return plain(*given)

    monkeypatch.setattr(module, "make_vocabulary", slow)
    monkeypatch.setattr(module, "MOST_SECONDS", 0.2)
    made = Grammars(tokenizer(), VOCAB)
    with pytest.raises(Refused, match=r"^structured_outputs: it was not compiled within"):
        made.compile(StructuredOutputsParams(regex="a"))
    refused.set()
    monkeypatch.setattr(module, "MOST_SECONDS", 60.0)
    assert made.compile(StructuredOutputsParams(regex="a"))
    assert in_time == [True]


def test_a_tokenizer_that_is_not_of_bytes_is_refused() -> None:
    words = Grammars(Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b")), 2)
    for _ in range(2):
        with pytest.raises(Refused, match="grammars read tokenizers of bytes only, not this engine's"):
            words.compile(StructuredOutputsParams(regex="a"))


def test_a_grammar_that_was_refused_keeps_all_that_callers_had_who_asked_for_it() -> None:
    """Their error is kept with the grammar; each time that it was raised it kept the frames of one more."""
    made = grammars()
    assert kept_by(lambda: made.compile(StructuredOutputsParams(regex="("))) == 0


def test_a_tokenizer_that_was_refused_keeps_all_that_callers_had_who_asked_for_a_grammar() -> None:
    words = Grammars(Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b")), 2)
    assert kept_by(lambda: words.compile(StructuredOutputsParams(regex="a"))) == 0


def test_a_grammar_is_compiled_once_and_old_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Grammars(tokenizer(), VOCAB)
    monkeypatch.setattr(module, "MOST_KEPT", 3)
    first = made.compile(StructuredOutputsParams(json={"type": "integer"}))
    assert made.compile(StructuredOutputsParams(json='{"type":"integer"}')) is first
    for n in range(4):
        made.compile(StructuredOutputsParams(regex="a" * n))
    assert len(made._kept) == 3
    assert made.compile(StructuredOutputsParams(json={"type": "integer"})) is not first
