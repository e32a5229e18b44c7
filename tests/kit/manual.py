"""The fenced blocks of our pages, and whether what a command said is what its page shows."""

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
SERVE = "hemiola serve "
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


class Block(NamedTuple):
    line: int
    kind: str  # "": commands for a shell
    text: str
    shown: str  # what stands in the block of kind text behind it: what it says


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = [*re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
    made = []
    for block, after in zip(found, [*found, None][1:], strict=True):
        between = text[block.end() : after.start()] if after else ""
        belongs = (
            after is not None and after[1] == "text" and not re.search(r"^(#|\|)", between, re.MULTILINE)
        )
        shown = after[2] if after and belongs else ""
        made.append(Block(text[: block.start()].count("\n") + 2, block[1], block[2], shown))
    return made


def commands(script: str) -> list[str]:
    """Each with its continuation lines and its here-document."""
    found: list[str] = []
    whole = True
    for line in script.splitlines():
        found[len(found) if whole else -1 :] = [line if whole else f"{found[-1]}\n{line}"]
        document = re.search(r"<<'(\w+)'", found[-1])
        whole = line == document[1] if document else not line.endswith("\\")
    return [command for command in found if command]


def serve_options(command: str) -> list[str]:
    """On free ports."""
    words = shlex.split(command.removeprefix(SERVE), comments=True)
    return [*words, "--openai-port=0"] if "--openai-port" in words else words


def check_said(said: str, shown: str) -> None:
    """All lines that the page shows come in that order; numbers may differ, and `...` stands for anything.

    JSON is compared as it is; of events only what they add up to, since a step may bring more or less.
    """
    if shown.startswith("{"):
        assert values(said) == values(shown)
    elif shown.startswith("data: "):
        assert summed(said) == summed(shown)
    else:
        at = 0
        for line in shown.splitlines():
            if line.strip() == "...":
                continue
            pattern = NUMBER.sub(r"\\d+(?:[.,]\\d+)*", re.escape(re.sub("─+", "─", line)))
            found = re.compile(pattern.replace("─", "─+")).search(said, at)
            assert found, f"{line!r} is not in what follows of\n{said}"
            at = found.end()


def values(text: str) -> list[object]:
    """JSON values, one after the other."""
    found = []
    while text := text.lstrip():
        value, end = json.JSONDecoder().raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


def summed(events: str) -> dict[str, object]:
    found = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line]
    ids = [event["output_ids"] for event in found]
    return found[-1] | {
        "text_output": "".join(event["text_output"] for event in found),
        "output_ids": [one for each in ids for one in (each if isinstance(each, list) else [each])],
    }
