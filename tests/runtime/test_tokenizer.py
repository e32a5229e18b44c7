"""Every section of a tokenizer.json means here what it means to transformers."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit import checkpoints
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from hemiola.builder.tokenizer import check_tokenizer
from hemiola.runtime.errors import Refused
from hemiola.runtime.text import Text

CONFIG = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>"}
TEMPLATE = "{% for m in messages %}{{ '<eos>' + m.role + ' ' + m.content }}{% endfor %}"
WORDS = [
    "", " ", "hello world", "  Hello,  WORLD \n", "<bos>hello", "naïve 你好 😀 e\u0301 ﬁ \u1e9b\u0323",
    "a<m>b <m>  c", "hello<eos>world<eos>", "9 <t>x 12<t>", "hellohello<s>hello <s> hello",
    "\ttabs\u00a0and\u200bspaces ", "HÉLLO<M>",
]  # fmt: skip


def byte_level() -> Tokenizer:
    vocab = {
        token: i for i, token in enumerate(["<eos>", "<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġ", "hello")]
    vocab |= {left + right: len(vocab) + i for i, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<eos>", "<bos>")])
    return tokenizer


def truncated(**options: object) -> Callable[[Tokenizer], None]:
    return lambda tokenizer: tokenizer.enable_truncation(4, **options)


def padded(**options: object) -> Callable[[Tokenizer], None]:
    return lambda tokenizer: tokenizer.enable_padding(pad_id=0, pad_token="<eos>", **options)


def put(**parts: object) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        for name, part in parts.items():
            setattr(tokenizer, name, part)

    return change


def added(content: str, special: bool = False, **options: bool) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(content, special=special, **options)])

    return change


def both(*changes: Callable[[Tokenizer], None]) -> Callable[[Tokenizer], None]:
    return lambda tokenizer: [change(tokenizer) for change in changes] and None


SINGLE = processors.TemplateProcessing(
    single="<bos> $A <eos>", pair="<bos> $A $B <eos>", special_tokens=[("<bos>", 1), ("<eos>", 0)]
)
BEGIN = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
SECTIONS: dict[str, Callable[[Tokenizer], None]] = {
    "plain": put(),
    "truncation_right": truncated(),
    "truncation_left": truncated(direction="left"),
    "truncation_only_first": truncated(strategy="only_first"),
    "truncation_only_second": truncated(strategy="only_second"),
    "truncation_stride": truncated(stride=2),
    "truncation_with_special_tokens": both(truncated(), put(post_processor=SINGLE)),
    "truncation_and_padding": both(truncated(), padded(length=64)),
    "padding_to_a_length": padded(length=64),
    "padding_on_the_left": padded(length=64, direction="left"),
    "padding_to_a_multiple": padded(pad_to_multiple_of=16),
    "padding_of_a_batch": padded(),
    "template_processing": put(post_processor=SINGLE),
    "template_processing_bos": put(post_processor=BEGIN),
    "byte_level_processing": put(post_processor=processors.ByteLevel(trim_offsets=False)),
    "sequence_processing": put(post_processor=processors.Sequence([processors.ByteLevel(), BEGIN])),
    "roberta_processing": put(post_processor=processors.RobertaProcessing(("<eos>", 0), ("<bos>", 1))),
    "bert_processing": put(post_processor=processors.BertProcessing(("<eos>", 0), ("<bos>", 1))),
    "added_special": added("<m>", special=True),
    "added_text": added("<m>"),
    "added_normalized": both(put(normalizer=normalizers.Lowercase()), added("<m>", normalized=True)),
    "added_not_normalized": both(put(normalizer=normalizers.Lowercase()), added("<m>", normalized=False)),
    "added_lstrip": added("<m>", lstrip=True),
    "added_rstrip": added("<m>", special=True, rstrip=True),
    "added_single_word": added("hello", single_word=True),
    "nfc": put(normalizer=normalizers.NFC()),
    "nfd": put(normalizer=normalizers.NFD()),
    "nfkc": put(normalizer=normalizers.NFKC()),
    "nfkd": put(normalizer=normalizers.NFKD()),
    "lowercase": put(normalizer=normalizers.Lowercase()),
    "prepend": put(normalizer=normalizers.Prepend("▁")),
    "replace": put(normalizer=normalizers.Replace(" ", "▁")),
    "replace_pattern": put(normalizer=normalizers.Replace(Regex(r"\s+"), " ")),
    "strip": put(normalizer=normalizers.Strip()),
    "strip_accents": put(normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "bert_normalizer": put(normalizer=normalizers.BertNormalizer()),
    "digits": put(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    ),
    "prefix_space": put(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "decoder_strip": put(decoder=decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])),
}  # fmt: skip


def save(folder: Path, tokenizer: Tokenizer, **config: object) -> Text:
    tokenizer.save(str(folder / "tokenizer.json"))
    wanted = {"tokenizer_class": "PreTrainedTokenizerFast", **CONFIG, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(wanted))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Text(folder)


def theirs(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("section", SECTIONS)
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, section: str) -> None:
    tokenizer = byte_level()
    SECTIONS[section](tokenizer)
    text, other = save(tmp_path, tokenizer), theirs(tmp_path)
    for words in WORDS:
        if not words.startswith("<bos>"):  # below
            assert text.encode(words) == other(words)["input_ids"], words
            long = words * 1000
            assert text.encode(long) == other(long)["input_ids"], "a long text"
        assert text.encode_words(words) == other(words, add_special_tokens=False)["input_ids"], words
        ids = text.encode(words)
        assert text.decode(ids) == other.decode(ids, skip_special_tokens=True), words
        messages = [{"role": "user", "content": words}, {"role": "assistant", "content": words}]
        wanted = other.apply_chat_template(messages, tokenize=True)["input_ids"]
        assert text.encode(text.chat(messages), special=False) == wanted, words


def test_truncation_and_padding_do_not_change_what_may_fit(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    text = save(tmp_path, tokenizer)
    assert len(text.encode("x" * 5000, 5000)) == 5000
    with pytest.raises(Refused, match=r"^prompt is 90000 characters"):
        text.encode("x" * 90_000, 5000)


def test_marks_of_thoughts_and_calls_are_text_unlike_in_transformers(tmp_path: Path) -> None:
    """transformers drops them where they are special tokens; a client has to read them."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<think>", "<m>"])
    text, other = save(tmp_path, tokenizer), theirs(tmp_path)
    ids = text.encode("a<think>b<m>")
    assert ids == other("a<think>b<m>")["input_ids"]
    assert (text.decode(ids), other.decode(ids, skip_special_tokens=True)) == ("a<think>b", "ab")


def test_a_bos_in_the_text_is_not_doubled_unlike_in_transformers(tmp_path: Path) -> None:
    """A client that renders the template itself sends the BOS, as a chat prompt has it here."""
    tokenizer = byte_level()
    tokenizer.post_processor = BEGIN
    text, other = save(tmp_path, tokenizer), theirs(tmp_path)
    assert text.encode("<bos>a") == other("<bos>a", add_special_tokens=False)["input_ids"] == [1, 66]
    assert other("<bos>a")["input_ids"] == [1, 1, 66]


def test_tokens_of_the_config_alone_are_no_tokens_unlike_in_transformers(tmp_path: Path) -> None:
    """transformers gives them ids behind the vocabulary, for which a model may have no embedding."""
    text = save(tmp_path, byte_level(), additional_special_tokens=["<x>"])
    assert len(text.encode("<x>")) == 3 and len(theirs(tmp_path)("<x>")["input_ids"]) == 1


def test_a_locale_changes_the_ids_of_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A special mark of thoughts is why the file is read again."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<think>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    real = Path.read_text

    def in_latin(path: Path, encoding: str = "latin-1", errors: str | None = None) -> str:
        return real(path, encoding, errors)

    monkeypatch.setattr(Path, "read_text", in_latin)
    text = "hello na\u00efve <think>"
    assert Text(tmp_path).encode(text) == tokenizer.encode(text).ids


def repeated(step: dict, number: int, key: str) -> dict:
    return {"type": "Sequence", key: [step] * number}


TEN_OF_ONE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
TEN_OF_NONE = {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "x" * 10}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
WHOLE = {"Sequence": {"id": "A", "type_id": 0}}
PAIR = {"single": [WHOLE], "pair": [WHOLE, {"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": {}}
# name: what is put into a tokenizer of which one character becomes millions
BOMBS = {
    "replace": {"normalizer": repeated(TEN_OF_ONE, 7, "normalizers")},
    "nested": {"normalizer": repeated(repeated(TEN_OF_ONE, 7, "normalizers"), 1, "normalizers")},
    "regex": {"normalizer": repeated(TEN_OF_NONE, 7, "normalizers")},
    "prepend": {"normalizer": repeated({"type": "Prepend", "prepend": "xxx"}, 4, "normalizers")},
    "forms": {"normalizer": repeated({"type": "NFKC"}, 4, "normalizers")},
    "bytes": {"pre_tokenizer": repeated(BYTES, 20, "pretokenizers")},
    "template": {"post_processor": {"type": "TemplateProcessing", **PAIR, "single": [WHOLE] * 1000}},
    "templates": {
        "post_processor": repeated(
            {"type": "TemplateProcessing", **PAIR, "single": [WHOLE] * 9}, 3, "processors"
        )
    },
    "decoder": {"decoder": repeated(TEN_OF_ONE, 7, "decoders")},
    "suffixes": {"decoder": repeated({"type": "BPEDecoder", "suffix": ""}, 30, "decoders")},
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_one_character_becomes_millions(bomb: str, tmp_path: Path) -> None:
    source = checkpoints.make("qwen3_5", tmp_path / "source")
    path = source / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | BOMBS[bomb]))
    with pytest.raises(Refused, match=r"may turn one character into .*, at most 64 are allowed"):
        Text(source)
    with pytest.raises(Refused, match=r"may turn one character into .*, at most 64 are allowed"):
        check_tokenizer(source, 2**20)


MARK = {"SpecialToken": {"id": "a", "type_id": 0}}


@pytest.mark.parametrize(
    ("num_ids", "marks"),
    [(5000, ["a"] * 5000), (1, ["a" * 5000]), (5000, ["a"])],
    ids=["ids", "characters", "ids without tokens"],
)
def test_ids_around_a_text_take_gigabytes(num_ids: int, marks: list[str], tmp_path: Path) -> None:
    """1,000 marks of 10,000 ids each are a file of 126 KB, and ten million ids."""
    source = checkpoints.make("qwen3_5", tmp_path / "source")
    path = source / "tokenizer.json"
    own = {"a": {"id": "a", "ids": [0] * num_ids, "tokens": marks}}
    step = {"type": "TemplateProcessing", **PAIR, "single": [MARK, WHOLE], "special_tokens": own}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": step}))
    with pytest.raises(Refused, match=r"puts \d+ ids and characters around each text, at most 4096 are"):
        Text(source)


@pytest.mark.parametrize(("part", "num", "said"), [("0", 2**22, "','"), ('{"type":"NFC"}', 2**17, "'{'")])
def test_a_tokenizer_of_64_megabytes_takes_gigabytes(part: str, num: int, said: str, tmp_path: Path) -> None:
    """Its library makes up to ninety bytes of each."""
    source = checkpoints.make("qwen3_5", tmp_path / "source")
    path = source / "tokenizer.json"
    bomb = f'"normalizer": {{"type": "Sequence", "x": [{",".join([part] * (num + 1))}]}}'
    path.write_text(f"{path.read_text().rstrip()[:-1]}, {bomb}}}")
    with pytest.raises(Refused, match=rf"it has \d+ times {said}, at most {num} are read"):
        Text(source)
    with pytest.raises(Refused, match=rf"it has \d+ times {said}, at most {num} are read"):
        check_tokenizer(source, 2**20)


HALF: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "\u0120": 1}, "continuing_subword_prefix": "x"}
MERGES: dict[str, list] = {"merge": [["a", "\u0120"]], "merge in a text": ["a \u0120"]}
HALVES = {how: json.dumps({"model": HALF | {"merges": merges}}) for how, merges in MERGES.items()}
HALVES["escaped name"] = HALVES["merge"].replace("_", r"\u005f")
HALVES["two models"] = f'{HALVES["merge"][:-1]}, "model": {{}}}}'


@pytest.mark.parametrize("how", HALVES)
def test_half_a_character_in_a_merge_ends_the_process(how: str, tmp_path: Path) -> None:
    """The library cuts off as many bytes as the prefix has, and cannot say what is left."""
    (tmp_path / "tokenizer.json").write_text(HALVES[how])
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from hemiola.runtime.tokenizer import checked_tokenizer\n"
        "try:\n"
        "    checked_tokenizer(Path(sys.argv[1]))\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "tokenizer.json"]
    ended = subprocess.run(command, capture_output=True, text=True)
    said = "the key 'mod" if how == "two models" else "a merge adds"
    assert (ended.returncode, ended.stdout[:12]) == (0, said), ended


def test_a_token_of_megabytes_is_repeated_by_an_answer(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["x" * 5000])
    with pytest.raises(Refused, match="it has a token of 5000 characters, at most 4096 are allowed"):
        save(tmp_path, tokenizer)


def test_a_special_token_of_megabytes_lets_a_template_make_gigabytes(tmp_path: Path) -> None:
    """What a conversation may cost grows with what it is given, and these were given to it."""
    with pytest.raises(Refused, match=r"names special tokens of \d+ characters, at most 65536 are read"):
        save(tmp_path, byte_level(), bos_token="x" * 70_000)


def test_ordinary_steps_are_no_bomb(tmp_path: Path) -> None:
    """As Llama's, T5's and ALBERT's tokenizers have them."""
    source = checkpoints.make("qwen3_5", tmp_path / "source")
    path = source / "tokenizer.json"
    steps = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        {"type": "Replace", "pattern": {"String": "``"}, "content": '"'},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        {"type": "NFKD"},
        {"type": "Lowercase"},
    ]
    normalizer = {"type": "Sequence", "normalizers": steps}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": normalizer}))
    assert Text(source) and check_tokenizer(source, 2**20)
