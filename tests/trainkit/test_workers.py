"""Worker processes: they are never forked from threads, end with their trainer, and a silent one is one line."""

import errno
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import psutil
import pytest
import torch
import tyro

import tiny
from deit_gka import train
from deit_gka.data import workers as loader_workers
from deit_gka.data.sources.base import Names
from deit_gka.training.config import TrainConfig
from processes import call, descendants, signals_kept, start, still_there
from sources import ROOT
from trainkit_gka import distributed, workers
from trainkit_gka.cli import PassingFault, UserError
from trainkit_gka.distributed import Stop
from vision_runs import STEPS_PER_EPOCH, TRAIN, flags, wait_for_step


@pytest.fixture
def started():
    """A function: the processes that were started in the test."""
    loader_workers.worker_context()  # starts their server, which stays
    before = descendants(os.getpid())
    return lambda: set(descendants(os.getpid())) - set(before)


def test_server_has_no_threads_and_blocks_signals():
    """With libraries that start threads when they are imported, and no variable that keeps them from it."""
    code = """
import numpy, pyarrow, torch, time
from multiprocessing import forkserver
from trainkit_gka import distributed, workers

workers.context("numpy", "pyarrow", "datasets")
worker = workers.context().Process(target=time.sleep, args=(60,), daemon=True)
worker.start()
pid = forkserver._forkserver._forkserver_pid
print(open(f"/proc/{pid}/status").read())
worker.kill()
"""
    limits = ("OMP_NUM_THREADS", *workers.NO_THREADS)
    environment = {key: value for key, value in os.environ.items() if key not in limits}
    status = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment, cwd=ROOT)
    values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(values["Threads"]) == 1
    for number in (signal.SIGINT, signal.SIGTERM):
        assert int(values["SigBlk"], 16) >> (number - 1) & 1


# Silent and dead workers


@pytest.fixture
def silent(pictures, tmp_path):
    """Images with a named pipe that nobody writes to: reading it takes as long as a disk that is gone."""
    image = shutil.copytree(pictures, tmp_path / "data") / "val/class_1/000.jpg"
    image.unlink()
    os.mkfifo(image)
    return tmp_path / "data"


def test_silent_worker_is_one_line(silent, tmp_path, monkeypatch, started):
    monkeypatch.setattr(loader_workers, "BATCH_TIMEOUT", 0.5)
    with signals_kept():
        message = tiny.refused(train.main, TrainConfig, *flags(silent, tmp_path), code=PassingFault.code)
    assert "no loading worker has sent images" in message and "; continue with: " in message
    assert not still_there(started())


def test_a_signal_ends_the_wait_for_a_silent_worker(silent, tmp_path):
    process = start(TRAIN, *flags(silent, tmp_path), folder=tmp_path / "output")
    wait_for_step(process, tmp_path, STEPS_PER_EPOCH)
    time.sleep(1)
    workers, began = descendants(process.processes[0].pid), time.monotonic()
    os.kill(process.processes[0].pid, signal.SIGTERM)
    done = process.wait(60)
    assert done.returncode == 128 + signal.SIGTERM and time.monotonic() - began < Stop.LIMIT + 10
    assert re.fullmatch("stopped by SIGTERM at update 6 .*\n", done.stderr) and not still_there(workers)


def test_an_error_in_an_evaluation_ends_its_workers(pictures, tmp_path, monkeypatch, started):
    """Also those that wait for a disk. Workers that nobody ends would live as long as the traceback."""

    def evaluate(models, images, *more):
        next(images)
        for pid in started():
            psutil.Process(pid).suspend()
        raise UserError("no")

    monkeypatch.setattr(train, "evaluate", evaluate)
    with signals_kept(), pytest.raises(UserError, match="no") as caught:
        train.main(tyro.cli(TrainConfig, args=[str(flag) for flag in flags(pictures, tmp_path)]))
    assert not still_there(started()) and caught.tb


def let_share_nothing(process: psutil.Process) -> None:
    """Sharing memory fails from now on, as in a /dev/shm that is full."""
    process.rlimit(psutil.RLIMIT_FSIZE, (1, 1))


FAULTS = [  # what befalls the workers, or their server; what is said of it
    (False, psutil.Process.kill, "ended with signal 9"),  # as the kernel does when memory runs out
    (True, psutil.Process.kill, "ended with exit code 255"),
    (False, let_share_nothing, "could not send its images.* --shm-size"),
]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("of_server, fault, message", FAULTS)
def test_a_lost_worker_or_batch_is_one_line_within_seconds(of_server, fault, message, ranks, pictures, tmp_path):
    """The server tells the trainer, which is not the workers' parent."""
    process = start(TRAIN, *flags(pictures, tmp_path, "--epochs", 1000), ranks=ranks, folder=tmp_path / "output")
    wait_for_step(process, tmp_path, 2)
    (server,) = psutil.Process(process.processes[-1].pid).children()
    for victim in [server] if of_server else server.children():
        fault(victim)
    process.processes[-1].join(60)
    assert process.processes[-1].exitcode == PassingFault.code
    process.kill()
    line = rf"(?m)^error: a loading worker {message}.*--num-workers; continue with: .*deit_gka\.train .*1000"
    assert re.search(line, process.err.read_text())


# Machines unlike ours


def test_workers_start_where_tmpdir_is_long(pictures, packed, tmp_path):
    """A socket's name has at most 107 bytes."""
    temporary = tmp_path / ("long" * 30)
    temporary.mkdir()
    options = {"folder": tmp_path / "output", "env": {**os.environ, "TMPDIR": str(temporary)}}
    call(TRAIN, *flags(pictures, tmp_path, "--epochs", 1), **options)
    places = ["--corpus", packed / "corpus", "--tokenizer", packed / "tokenizer", "--out", tmp_path / "packed"]
    call("nanochat_gka.pack", *places, "--workers", 2, **options)


def test_shared_memory_that_is_small_or_read_only_is_one_line(pictures, tmp_path, monkeypatch):
    """As in a container."""
    read_only = Mock(side_effect=OSError(errno.EROFS, "Read-only file system"))
    for owner, name, fault, message in (
        (workers, "shared_memory", lambda: 65536, "which has 0 MB free.* --shm-size"),
        (multiprocessing.get_context("forkserver"), "Lock", read_only, "nothing can be written to /dev/shm"),
    ):
        with monkeypatch.context() as patched, signals_kept():
            patched.setattr(owner, name, fault)
            assert re.search(message, tiny.refused(train.main, TrainConfig, *flags(pictures, tmp_path)))


def compare(names: Names, expected: list[str], answers) -> None:
    answers.put(([*names] == expected, *(tensor.is_shared() for tensor in names.tensors)))


def test_workers_share_the_names_of_files():
    expected = [f"class_{number % 7}/{number}.jpg" for number in range(20_000)] + [os.fsdecode(b"caf\xe9.png"), ""]
    names, answers = Names(expected), workers.context().SimpleQueue()
    workers.context().Process(target=compare, args=(names, expected, answers)).start()
    assert answers.get() == (True, True, True) and names.tensors[0].is_shared()
    assert [*Names([])] == []


# Cores


BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    "membership, files, cores, memory",
    [
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 3, BYTES),  # as a container sees itself
        ("0::/pod/box\n", {"pod/cpu.max": "200000 100000", "pod/box/cpu.max": "max 100000"}, 2, BYTES),
        ("1:cpu,cpuacct:/b\n0::/\n", {"cpu,cpuacct/b/cpu.cfs_quota_us": "400000"}, 4, BYTES),
        ("1:cpu,cpuacct:/b\n", {"cpu,cpuacct/b/cpu.cfs_quota_us": "-1"}, 8, BYTES),  # without a limit
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "4194304"}, 8, 4194304),
        ("7:memory:/c\n", {"memory/c/memory.limit_in_bytes": "2097152"}, 8, 2097152),
    ],
)
def test_cores_and_memory_are_within_the_limits_of_a_container(membership, files, cores, memory, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    for name, text in {**files, "cpu,cpuacct/b/cpu.cfs_period_us": "100000\n", "membership": membership}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert workers.cores(tmp_path, tmp_path / "membership") == cores
    assert workers.main_memory(tmp_path, tmp_path / "membership") == memory


@pytest.mark.parametrize("variable, number", [("", 3), ("OMP_NUM_THREADS", 4)])
def test_torch_and_loading_take_no_more_cores_than_there_are(variable, number, threads, monkeypatch):
    monkeypatch.setattr(distributed, "cores", lambda: 3)
    monkeypatch.setattr(workers, "cores", lambda: 3)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "4")
    threads(4)
    distributed.setup("cpu")
    assert torch.get_num_threads() == number
    for ranks, loading in ((1, 3), (2, 1), (7, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert loader_workers.default_workers() == loading
