"""Worker processes: they are never forked from threads, end with their trainer, and a silent one is one line."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tyro

from deit_gka import train
from deit_gka.data import workers as loader_workers
from deit_gka.data.sources import open_source
from deit_gka.data.sources.base import Names
from deit_gka.data.transforms import eval_transform
from deit_gka.training.config import TrainConfig
from processes import descendants, signals_kept, start, still_there
from sources import ROOT
from trainkit_gka import distributed, workers
from trainkit_gka.cli import PassingFault, UserError
from trainkit_gka.distributed import Runtime
from vision_runs import TRAIN, flags, in_process, wait_for_step

# --- Nothing forks ---


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
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    values = dict(line.split(":\t", 1) for line in done.stdout.splitlines() if ":\t" in line)
    assert int(values["Threads"]) == 1
    for number in (signal.SIGINT, signal.SIGTERM):
        assert int(values["SigBlk"], 16) >> (number - 1) & 1


# --- Silent and dead workers ---


def test_kill_9_leaves_neither_workers_nor_server(pictures, tmp_path):
    process = start(TRAIN, *flags(pictures, tmp_path), folder=tmp_path / "output")
    wait_for_step(process, tmp_path, 2)
    started = descendants(process.processes[0].pid)
    assert len(started) >= 3  # their server and two workers
    process.kill()
    assert not still_there(started)


def test_silent_worker_is_one_line(pictures, tmp_path, capsys, monkeypatch):
    """A named pipe that nobody writes to: reading it takes as long as a disk that is gone."""
    shutil.copytree(pictures, tmp_path / "data")
    (tmp_path / "data/val/class_1/000.jpg").unlink()
    os.mkfifo(tmp_path / "data/val/class_1/000.jpg")
    monkeypatch.setattr(loader_workers, "BATCH_TIMEOUT", 0.5)
    before = descendants(os.getpid())
    with signals_kept():
        argv = flags(tmp_path / "data", tmp_path)
        message = in_process(train.main, TrainConfig, *argv, capsys=capsys, code=PassingFault.code)
    assert "no loading worker has sent images" in message and "; continue with: " in message
    assert not still_there(set(descendants(os.getpid())) - set(before))


def test_idle_workers_end_with_the_evaluation():
    """As those do that wait for a disk: the process's own end would wait for them."""
    transform, runtime = eval_transform(16, 1.0), Runtime(0, 1, torch.device("cpu"))
    before = descendants(os.getpid())
    images = loader_workers.evaluation_batches(open_source("digits", "val"), transform, runtime, 4, 2)
    next(images)
    started = set(descendants(os.getpid())) - set(before)
    assert len(started) >= 2
    for pid in started:
        os.kill(pid, signal.SIGSTOP)
    images.close()
    assert not still_there(started)


def test_an_error_in_an_evaluation_ends_its_workers(pictures, tmp_path, monkeypatch):
    """One that nobody has closed would keep them while its traceback lives, which the process's end does not."""

    def evaluate(models, images, *others):
        next(images)
        raise UserError("no")

    monkeypatch.setattr(train, "evaluate", evaluate)
    before = descendants(os.getpid())
    with signals_kept(), pytest.raises(UserError, match="no") as caught:
        train.main(tyro.cli(TrainConfig, args=[str(flag) for flag in flags(pictures, tmp_path)]))
    assert not still_there(set(descendants(os.getpid())) - set(before)) and caught.tb


BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    "membership, files, cores, memory",
    [
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 3, BYTES),  # a container of its own
        ("0::/pod/box\n", {"pod/cpu.max": "200000 100000", "pod/box/cpu.max": "max 100000"}, 2, BYTES),
        ("1:cpu,cpuacct:/b\n0::/\n", {"cpu,cpuacct/b/cpu.cfs_quota_us": "400000"}, 4, BYTES),
        ("0::/elsewhere\n", {"cpu.max": "20000 100000"}, 1, BYTES),
        ("1:cpu,cpuacct:/b\n", {"cpu,cpuacct/b/cpu.cfs_quota_us": "-1"}, 8, BYTES),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "4194304"}, 8, 4194304),
        ("7:memory:/c\n", {"memory/c/memory.limit_in_bytes": "2097152"}, 8, 2097152),
        ("", {}, 8, BYTES),
    ],
)
def test_cores_and_memory_are_within_the_limits_of_a_container(membership, files, cores, memory, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    for name, text in {**files, "cpu,cpuacct/b/cpu.cfs_period_us": "100000\n", "membership": membership}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert workers.cores(tmp_path, tmp_path / "membership") == cores
    assert workers.main_memory(tmp_path, tmp_path / "membership") == memory
    monkeypatch.setattr(loader_workers.workers, "cores", lambda: cores)
    for ranks in (1, 7):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert loader_workers.default_workers() == max(1, cores // ranks)


@pytest.mark.parametrize("variable, number", [("", 1), ("OMP_NUM_THREADS", 4)])
def test_torch_takes_no_more_threads_than_cores_where_no_variable_sets_them(variable, number, threads, monkeypatch):
    monkeypatch.setattr(distributed, "cores", lambda: 1)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "4")
    threads(4)
    distributed.setup("cpu")
    assert torch.get_num_threads() == number


@pytest.mark.parametrize("ranks,ended", [(1, "signal 9"), (2, "signal 9"), (1, "exit code 255")])
def test_killed_worker_is_one_line(pictures, tmp_path, ranks, ended):
    """As the kernel does when memory runs out. The server tells the trainer, which is not its parent, or ends."""
    process = start(TRAIN, *flags(pictures, tmp_path, "--epochs", 1000), ranks=ranks, folder=tmp_path / "output")
    wait_for_step(process, tmp_path, 2)
    trainer = process.processes[-1].pid
    (server,) = (int(pid) for pid in Path(f"/proc/{trainer}/task/{trainer}/children").read_text().split())
    loading = map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())
    for pid in loading if ended == "signal 9" else [server]:
        os.kill(pid, signal.SIGKILL)
    process.processes[-1].join(300)
    assert process.processes[-1].exitcode == PassingFault.code
    for member in process.processes:
        member.kill()
        member.join()
    line = rf"(?m)^error: a loading worker ended with {ended} .*--num-workers; continue with: .*deit_gka\.train .*1000"
    assert re.search(line, process.err.read_text())


def compare(names: Names, expected: list[str], answers) -> None:
    answers.put(([*names] == expected, names._text.is_shared(), names._ends.is_shared()))


def test_workers_share_the_names_of_files(pictures):
    expected = [f"class_{number % 7}/{number}.jpg" for number in range(20_000)] + [os.fsdecode(b"caf\xe9.png"), ""]
    names, context = Names(expected), workers.context()
    answers = context.SimpleQueue()
    worker = context.Process(target=compare, args=(names, expected, answers))
    worker.start()
    assert answers.get() == (True, True, True) and names._text.is_shared()
    worker.join()
    assert [*Names([])] == []
