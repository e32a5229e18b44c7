"""The requests of a benchmark: what needs no engine is read, and refused, before one is opened."""

import json
import sys
from pathlib import Path

from hemiola.runtime.bench import workloads
from hemiola.runtime.bench.dataset import read_entries, read_sessions, refuse_too_many
from hemiola.runtime.bench.options import MULTI_TURN, BenchOptions
from hemiola.runtime.bench.workloads import Source, Turns
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM

DEFAULT_NUM_REQUESTS = 32
# The bundled checkpoints were trained on Python's own sources, which every machine with Python has.
LIBRARY = ("argparse", "ast", "bdb", "calendar", "cmd", "codecs", "configparser", "csv", "dis", "doctest")
TEXT_LEN = 300_000  # characters


class Asked:
    """The options, and a file's entries or a text where they name one; ids are made of it with an engine."""

    def __init__(self, options: BenchOptions) -> None:
        self.options = options
        self._count = options.num_requests or DEFAULT_NUM_REQUESTS
        self._entries: list[tuple[str, object]] | None = None
        self._text: str | None = None
        if options.file is not None:
            if options.text is not None:
                message = f"--text {options.text} and --workload {options.file} were both given"
                raise Refused("conflict", "text", message=message, way_out="drop one")
            self._entries = read_entries(options.file, options.num_requests)
        elif options.text is not None or options.workload == MULTI_TURN:
            self._text = _read_text(options.text)

    def refuse_too_long(self, max_len: int) -> None:
        """For lengths that were chosen; a prompt of a file that does not fit is a failed request."""
        if self._entries is None:
            workloads.refuse_too_long(self.options, self._count, max_len)
        else:
            refuse_too_many(self._entries, max_len)

    def sessions(self, llm: LLM) -> list[Turns]:
        options = self.options
        if self._entries is not None:
            return read_sessions(self._entries, options.output_len, llm)
        source = workloads.random_ids(llm.manifest.vocab_size) if self._text is None else self._pieces(llm)
        if options.workload == MULTI_TURN:
            return workloads.multi_turn_sessions(options, self._count, source)
        if self._text is None:
            print(
                "warning: no draft can guess random tokens;"
                " to see acceptance use --text, multi-turn or a file",
                file=sys.stderr,
                flush=True,
            )
        return workloads.random_sessions(options, self._count, source)

    def _pieces(self, llm: LLM) -> Source:
        """Prompts are slices of the text, which is none itself."""
        assert self._text is not None
        path = self.options.text
        try:
            ids = llm.encode(self._text, must_fit=False)
        except Refused as error:
            asked = MULTI_TURN if path is None else f"--text {path}"
            message = f"{asked} draws its prompts from text: {error}"
            raise Refused(
                "unsupported", "text", message=message, way_out="or use --workload random"
            ) from None
        if not ids:
            raise Refused(
                "out_of_range", "text", message=f"--text {path} is empty", way_out="give a text file"
            )
        return workloads.slices(ids)


def _read_text(path: Path | None) -> str:
    if path is None:
        folder = Path(json.__file__).parent.parent
        return "".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in LIBRARY)[:TEXT_LEN]
    try:
        return path.read_text(encoding="utf-8")[:TEXT_LEN]
    except UnicodeDecodeError as error:
        message = f"--text {path} is not UTF-8 at byte {error.start}"
        raise Refused("malformed", "text", message=message, way_out="convert it") from None
    except OSError as error:
        message = f"--text {path} cannot be read ({error.strerror})"
        raise Refused("not_found", message=message, way_out="give a text file") from None
