"""Real processes that skip the seconds of importing PyTorch.

`start` runs a command in a process for each rank, forked from a server that has imported the libraries. The process's
server of loading workers is forked too, before there are threads; a fork after that is an error.
"""

import atexit
import contextlib
import gc
import itertools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import psutil

from gka.impl.cpu import build
from sources import ROOT
from trainkit_gka import workers
from trainkit_gka.cli import UserError

HANG_AFTER = 1200  # seconds; tells a hang from a machine that has twenty other things to do
LIBRARIES = [
    *("deit_gka.training.images", "deit_gka.training.optim", "deit_gka.model.warm_start"),
    *("nanochat_gka.training.optim", "nanochat_gka.core_metric.scoring", "nanochat_gka.generation.engine"),
    *("trainkit_gka.loop", "tyro", "torch._dynamo"),
    *("sklearn.datasets", "sklearn.model_selection", "processes"),
]


def without_kernel() -> dict[str, str]:
    """The variable that keeps commands from saying each time that the CPU kernel cannot be built, where it cannot."""
    return {build.SWITCH: "0"} if build.obstacle() else {}


def environment() -> dict[str, str]:
    return {**os.environ, **without_kernel(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def without_account(home: Path) -> dict[str, str]:
    """The environment of someone who has never heard of Weights & Biases."""
    variables = {name: value for name, value in environment().items() if not name.startswith("WANDB_")}
    return {**variables, "HOME": str(home), "NETRC": str(home / "none")}


def _run(module: str, argv: list[str], environment: dict[str, str | None], output: str, errors: str) -> None:
    gc.freeze()  # the libraries stay
    for path, descriptor in ((output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    for name in environment:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in environment.items() if value is not None})
    tempfile.tempdir = None  # it is looked for anew, in this environment
    multiprocessing.current_process()._config.pop("tempdir", None)
    sys.argv, sys.orig_argv = [module, *argv], [sys.executable, "-m", module, *argv]
    forked = mock.patch.object(multiprocessing.util, "spawnv_passfds", _fork_in_place_of_exec)
    with forked, contextlib.suppress(UserError):  # the command raises it again
        workers.context()
    threading.Thread(target=workers.end_with_parent, daemon=True).start()
    pid = os.getpid()
    sys.addaudithook(lambda event, _: _refuse_fork() if event.startswith("os.fork") and os.getpid() == pid else None)
    sys.modules.pop(module, None)  # the command's server may have imported it, of which runpy warns
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def _fork_in_place_of_exec(path: str, arguments: list[str], descriptors: list[int]) -> int:
    """Start `python -c` without starting Python."""
    pid = os.fork()
    if pid:
        return pid
    try:
        for low, high in itertools.pairwise([2, *sorted(descriptors), os.sysconf("SC_OPEN_MAX")]):
            os.closerange(low + 1, high)
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def _refuse_fork() -> None:
    raise RuntimeError("a process that has threads was about to fork")


def server():
    """The server of this process, with the libraries. Call it before anything else starts one without them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    with mock.patch.dict(os.environ, environment(), PYTHONPATH=f"{ROOT / 'tests/support'}{os.pathsep}{ROOT}"):
        multiprocessing.forkserver.ensure_running()
    return context


class Running:
    """Processes of one command, one for each rank, with their output so far.

    env: their variables, set after the libraries were imported.
    """

    def __init__(self, module: str, *flags, ranks: int = 1, folder: Path, env: dict[str, str] | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = folder / "stdout", folder / "stderr"
        for path in (self.out, self.err):
            path.write_text("")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        group = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        changed = {name: env.get(name) for name in {*os.environ, *env}} if env else {}
        self.processes = []
        for rank in range(ranks):
            places = {**group, "RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
            variables = without_kernel() | changed | {name: str(value) for name, value in places.items()}
            arguments = (module, [*map(str, flags)], variables, str(self.out), str(self.err))
            self.processes.append(server().Process(target=_run, args=arguments))
            self.processes[-1].start()

    def alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        """As a machine that goes down would."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def wait(self, timeout: float = HANG_AFTER) -> subprocess.CompletedProcess:
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        output, errors = self.out.read_text(), self.err.read_text()
        if self.alive():
            self.kill()
            raise TimeoutError(output[-2000:] + errors[-4000:])
        code = next((process.exitcode for process in self.processes if process.exitcode), 0)
        return subprocess.CompletedProcess([], code, output, errors)


start = Running


def call(module: str, *flags, check: bool = True, **options) -> subprocess.CompletedProcess:
    """Run a command to its end. options: of `Running`."""
    done = Running(module, *flags, **options).wait()
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def in_a_forked_child(compute, timeout: float = 60):
    """What `compute()` gives in a child that is forked from this process, without the threads of this one."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(compute()))
    child.start()
    try:
        return queue.get(timeout=timeout)
    finally:
        child.kill()
        child.join()


def descendants(pid: int) -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def still_there(pids, seconds: float = 120) -> list[int]:
    """The processes that still run; none, sooner or later."""
    end, running = time.monotonic() + seconds, [*pids]
    while running and time.monotonic() < end:
        time.sleep(0.02)
        running = [pid for pid in running if _runs(pid)]
    return running


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def signals_kept():
    """A trainer in this process sets handlers; take them back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
