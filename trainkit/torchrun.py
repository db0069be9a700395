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
            if not _repeat(note, failed.get_first_failure()[1].exitcode):
                raise
        except SignalException as signalled:  # from outside, or from a command whose mistake must not be tried again
            return UserError.code if _repeat(note, UserError.code) else 128 + signalled.sigval
        else:
            return 0
        return json.loads(note.read_text())["code"]


def _repeat(note: Path, code: int) -> bool:
    """Print the error that a command left in `note`, if it left with `code`; returns whether it did."""
    if not note.exists() or (error := json.loads(note.read_text()))["code"] != code:
        return False
    print(f"error: {error['message']}", file=sys.stderr)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
