"""torchrun, so that a mistake ends with its one line and exit code, and restarted processes do not hang.

    python -m trainkit.torchrun --standalone --nproc-per-node 7 -m -- nanochat_gka.train --data PACKED

The flags are torchrun's; the dashes keep it from taking our --run for its --run-path. torchrun alone runs the same,
but shows a traceback of its own after any error and exits with 1.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trainkit.cli import LAST_ERROR, SHUTDOWN_TIMEOUT, STORE_SWITCH, UserError

# Seconds for a step and a save after SIGTERM or Ctrl-C; torchrun's own 30 may be too few.
SETTINGS = {STORE_SWITCH: "1", SHUTDOWN_TIMEOUT: "300"}


def main(words: Sequence[str]) -> int:
    """Run torchrun with `words`. Returns the exit code, that of the command if it ended with a mistake or a fault."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from torch.distributed import run  # reads the settings
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder, "error.json")
        os.environ[LAST_ERROR] = str(note)
        try:
            run.main(words)
        except ChildFailedError as failed:
            # A mistake counts also where its process was ended before it could leave.
            if code := _say(note, {UserError.code, *(failure.exitcode for failure in failed.failures.values())}):
                return code
            raise
        except SignalException as signalled:  # from outside, or from a command whose mistake must not be tried again
            return _say(note, {UserError.code}) or 128 + signalled.sigval
    return 0


def _say(note: Path, codes: set[int]) -> int:
    """Print the error that a command left in `note` with one of `codes`, and return that; 0 if there is none."""
    error = json.loads(note.read_text()) if note.exists() else {"code": 0}
    if error["code"] not in codes:
        return 0
    print(f"error: {error['message']}", file=sys.stderr)
    return error["code"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
