"""What the trainers share: the loop, flags, processes and devices, checkpoints, files, progress, results, pictures."""

import os
import signal
import sys


def interrupted(number, frame):
    """A handler that ends a command by Ctrl-C while its modules are imported: some take KeyboardInterrupt for an error
    of theirs. `cli.run` handles Ctrl-C from then on.
    """
    if os.environ.get("RANK", "0") == "0":
        os.write(sys.__stderr__.fileno(), b"interrupted\n")
    os._exit(130)


def importing(package):
    """Set that handler if this process was started by `python -m` with a module of `package`, which is being imported.

    The standard library alone, no newer Python than 3.8.
    """
    words = getattr(sys, "orig_argv", [])
    at = len(words) - len(sys.argv)  # of the module's name
    is_command = at > 1 and words[at - 1].startswith("-") and words[at].partition(".")[0] == package
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)


importing(__name__)
