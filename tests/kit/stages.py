"""What a command says of its stages, which depends on how busy the machine is."""

import re

STAGE = re.compile(r"^.+: \d+\.\d s( so far)?\n", re.MULTILINE)


def without_stages(said: str) -> str:
    """The rest."""
    return STAGE.sub("", said)
