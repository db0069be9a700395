"""A corpus, a tokenizer and packed rows small enough to train on in a second, and helpers to run the real commands."""

import contextlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import processes
from processes import HANG_AFTER
from trainkit_gka.cli import UserError, run
from trainkit_gka.progress import read_events

SEQUENCE_LEN = 32
TEXT = (
    "the a kernel token row mixes every head learns one bandwidth and nothing else so that "
    "past values come back with weights of its own"
)
WORDS = TEXT.split()
ODD_TEXTS = [  # for tokenizers
    "",
    "   ",
    " " * 700 + "x",
    "\r\n\r\n \r\n\t  \n",
    "\x00\x01\x7f\u0085\ufeff\u2028",
    "🦜👩‍👩‍👧‍👦 e\u0301 é",
    "東京 Москва עברית ไทย ᠮᠣᠩᠭᠣᠯ ½Ⅷ٣",
    "'ſ DON'T we'll 'LL 1234567",
    "<|bos|>a<|user_start|>b<|output_end|><|bos|",
    b"caf\xc3 \xff\xfe\xe6\x9d".decode(errors="replace"),
    "aba" * 300 + "aab" * 77,
]
TRAIN_FLAGS = (
    "--depth 2 --aspect-ratio 16 --head-dim 16 --window-pattern SL --device-batch-size 3 --eval-every -1 "
    f"--eval-tokens 256 --sample-every -1 --device-type cpu --total-batch-size {8 * SEQUENCE_LEN}"
).split()


needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX") or "g++") is None, reason="torch.compile needs a C++ compiler on a CPU"
)


def documents(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 40))) + "." for _ in range(count)]


def write_corpus(folder: Path, files: int = 2, docs: int = 400, row_group: int = 50) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(files):
        table = pa.table({"text": documents(docs, index)})
        pq.write_table(table, folder / f"shard_{index:05d}.parquet", row_group_size=row_group)
    return folder


def command(module: str, *flags) -> list[str]:
    return [sys.executable, "-m", module, *map(str, flags)]


def call(module: str, *flags, ranks: int = 1, check: bool = True, env: dict[str, str] | None = None):
    """Run a command to its end, with the variables of `env`, forked from a process that has imported PyTorch."""
    with tempfile.TemporaryDirectory() as folder:
        return processes.call(module, *flags, ranks=ranks, check=check, folder=Path(folder), env=env)


def exit_code(main, config, *flags) -> int:
    """Of a command's function in this process."""
    try:
        run(main, config, [str(flag) for flag in flags])
    except SystemExit as end:
        return end.code
    return 0


def refused(main, config, *flags, code: int = UserError.code) -> str:
    """The one line with which a command's function, in this process, refuses its flags, and leaves with `code`."""
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        assert exit_code(main, config, *flags) == code, errors.getvalue()
    message = errors.getvalue()
    assert message.startswith("error: ") and message.count("\n") == 1, message
    return message


def events(out: Path, event: str, tag: str = "run") -> list[dict]:
    """The lines of a run's log that are of `event`."""
    return read_events(out / tag / "log.jsonl", event)


def steps_of(out: Path) -> list[int]:
    """The training steps that the log has so far, while another process may write it."""
    return [record["step"] for record in events(out, "train")]


def metrics(out: Path) -> dict:
    """The numbers of the only finished run."""
    return json.loads((out / "results.jsonl").read_text())["metrics"]


def final(out: Path, step: int | None = None) -> list[bytes]:
    """The tensors of the checkpoint at a step, or of the newest one."""
    folder = out / "run/checkpoints"
    path = sorted(folder.iterdir())[-1] if step is None else folder / f"step_{step:08d}"
    return [file.read_bytes() for file in sorted(path.glob("*.safetensors"))]


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    """Wait for its end; what it printed since it was read last."""
    output, errors = process.communicate(timeout=HANG_AFTER)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


# Lines of other programs and versions in a log, and some that are cut short.
NOT_OF_THIS_RUN = """\
{}
[]
null
5
not JSON
{"event": "train"}
{"step": 1}
{"event": 5, "step": 2}
{"event": "eval", "step": "x"}
{"event": "eval", "step": 1}
{"event": "train", "step": 1}
{"event": "fin
{"event": "core", "step": 1}
{"event": "start", "step": 1.5}
""".splitlines()


@contextlib.contextmanager
def one_line_error(pattern: str):
    """A UserError of one line comes out of what is inside."""
    with pytest.raises(UserError, match=pattern) as raised:
        yield raised
    assert "\n" not in str(raised.value)


def assert_one_line_error(done: subprocess.CompletedProcess, pattern: str, code: int = 2) -> None:
    """The exit code, one line on stderr, no traceback."""
    assert done.returncode == code, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: ") and re.search(pattern, lines[0]), done.stderr
