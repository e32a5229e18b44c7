"""What a model says, on a terminal: terminals obey some characters, and anybody may have written a model or
what it repeats."""

import sys

KEPT = "\n\t"
CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in KEPT}
CONTROLS[ord("\r")] = ""  # lines of some texts end in it, too


def say(text: str) -> None:
    """To stdout at once: as it is into a pipe or a file, without what terminals obey on a terminal."""
    print(text.translate(CONTROLS) if sys.stdout.isatty() else text, end="", flush=True)
