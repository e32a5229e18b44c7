"""The program of a trial (trial.py): it reads a vocabulary, then grammars, a line each.

It answers each that was compiled, or found to be wrong. A grammar that takes too much ends it.
"""

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path

from tokenizers import Tokenizer

from hemiola.runtime.api import StructuredOutputsParams
from hemiola.runtime.choose.grammar import Vocabulary, compile_grammar, make_vocabulary
from hemiola.runtime.choose.trial import TrialLimits
from hemiola.runtime.errors import Refused

CLOCKS = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}
MAX_WAIT = 12  # times the limit of processor time
STACK = 2**20  # bytes; the threads of the process that serves have twice as many, or more


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the process that serves
    for number in CLOCKS.values():  # they end this process, whatever the library does
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CLOCKS.values())
    threading.stack_size(STACK)
    tokenizer, vocab_size, *given = json.loads(sys.stdin.readline())
    limits = TrialLimits(*given)
    vocabulary = make_vocabulary(Tokenizer.from_str(tokenizer), vocab_size)
    num_bytes = _data_bytes() + limits.num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
    for line in sys.stdin:
        _limit(limits.seconds)
        thread = threading.Thread(target=_try, args=(vocabulary, line))
        thread.start()
        thread.join()
        _limit(0)
        print("passes", flush=True)


def _limit(seconds: float) -> None:
    """Of a processor; and a number of times as long for a process that gets none. 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, MAX_WAIT * seconds)


def _try(vocabulary: Vocabulary, line: str) -> None:
    try:
        asked = StructuredOutputsParams.model_validate_json(line, by_alias=True)
        compile_grammar(vocabulary, asked)
    except Refused:  # the process that serves finds the same, and says what
        pass
    except BaseException:
        os._exit(1)


def _data_bytes() -> int:
    """What RLIMIT_DATA counts, now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024


if __name__ == "__main__":
    main()
