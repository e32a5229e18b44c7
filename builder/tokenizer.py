"""A checkpoint's tokenizer, checked and copied into the engine."""

import shutil
import sys
from pathlib import Path

from hemiola.builder.checkpoint import TOKENIZER_FILES, file_in, read_json
from hemiola.runtime.errors import Refused, one_line
from hemiola.runtime.json_file import check_size
from hemiola.runtime.tokenizer import FILES, panics_as_errors, read_tokenizer


def check_tokenizer(folder: Path, vocab_size: int) -> bool:
    """Whether there is one. It must be readable, and every id that it makes one that the model knows."""
    for name in TOKENIZER_FILES:
        if file := file_in(folder, name):
            check_size(file, "download it again", FILES[name])
    path = file_in(folder, TOKENIZER_FILES[0])
    if path is None:
        print(
            f"warning: {folder} has no tokenizer.json: this engine takes and gives token ids; for text,"
            " save the tokenizer in the tokenizers format and build again",
            file=sys.stderr,
        )
        return False
    try:
        with panics_as_errors():
            tokenizer = read_tokenizer(path)
            around = tokenizer.encode("").ids  # what stands around each text
            ids = [*tokenizer.get_vocab(with_added_tokens=True).values(), *around]
    except Exception as error:  # tokenizers raises nothing narrower
        message = f"{path} is not a tokenizer ({one_line(error)})"
        raise Refused("damaged", message=message, way_out="download it again") from None
    if max(ids, default=0) >= vocab_size:
        message = f"{path} has ids up to {max(ids)}, but vocab_size is {vocab_size}"
        raise Refused("conflict", message=message, way_out="correct one of them")
    return True


def copy_tokenizer(source: Path, folder: Path) -> None:
    """tokenizer.json, its config and the chat template, which older checkpoints keep inside the config."""
    folder.mkdir()
    for name in TOKENIZER_FILES:
        if file := file_in(source, name):
            shutil.copyfile(file, folder / name)
    config = file_in(source, "tokenizer_config.json")
    template = read_json(config).get("chat_template") if config else None
    if isinstance(template, list):  # several named ones
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    made = folder / "chat_template.jinja"
    if isinstance(template, str) and not made.exists():
        try:
            made.write_text(template, encoding="utf-8")
        except UnicodeEncodeError as error:
            message = f"{config}: chat_template is not Unicode ({one_line(error)})"
            raise Refused("malformed", message=message, way_out="correct it") from None
        if (size := made.stat().st_size) > (limit := FILES[made.name]):
            message = f"{config}: chat_template has {size} bytes, at most {limit} are read"
            raise Refused("too_long", message=message, way_out="use another checkpoint")
