"""lm-evaluation-harness's command on a model of ours, on tasks of a folder alone.

It would index its own tasks at every start, 14,000 files, which takes seconds.
"""

import functools
import sys
from pathlib import Path
from unittest import mock


def call(run: Path | str, tasks: Path, *flags, kind: str = "gka", key: str = "run") -> None:
    """The command on the tasks of the folder `tasks`, each named as its file. Further model_args may follow `run`."""
    from lm_eval.tasks import TaskManager

    from nanochat_gka import harness

    names = ",".join(path.stem for path in tasks.glob("*.yaml"))
    words = ["--model", kind, "--model_args", f"{key}={run}", "--device", "cpu", "--batch_size", "5"]
    words += ["--tasks", names, "--include_path", str(tasks), *map(str, flags)]
    alone = functools.partialmethod(TaskManager.__init__, include_defaults=False)
    with mock.patch.object(sys, "argv", ["harness", *words]), mock.patch.object(TaskManager, "__init__", alone):
        harness.main()
