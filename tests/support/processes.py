"""Real processes that skip the seconds of importing PyTorch.

`start` runs a command in a process for each rank, forked from a server that has the libraries imported. That process's
own server, of loading workers, is forked too, before there are threads; a fork after that is an error.
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
import time
from pathlib import Path
from unittest import mock

from gka.impl.cpu import build
from trainkit_gka import workers

HANG_AFTER = 1200  # seconds; tells a hang from a machine that has twenty other things to do
LIBRARIES = [
    *("deit_gka.training.images", "deit_gka.training.optim", "deit_gka.model.warm_start"),
    *("nanochat_gka.training.optim", "nanochat_gka.core_metric.during_training", "nanochat_gka.generation.engine"),
    *("trainkit_gka.loop", "tyro", "torch._dynamo"),
    *("sklearn.datasets", "sklearn.model_selection", "processes"),
]


def without_kernel() -> dict[str, str]:
    """Where the CPU kernel cannot be built: the variable that keeps commands under test from saying so every time."""
    return {build.SWITCH: "0"} if build.obstacle() else {}


def environment() -> dict[str, str]:
    return {**os.environ, **without_kernel(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _run(module: str, argv: list[str], environment: dict[str, str | None], output: str, errors: str) -> None:
    gc.freeze()  # the libraries stay
    for path, descriptor in ((output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    tempfile.tempdir = None  # it is looked for anew, in this environment
    sys.argv, sys.orig_argv = [module, *argv], [sys.executable, "-m", module, *argv]
    with mock.patch.object(multiprocessing.util, "spawnv_passfds", _fork_in_place_of_exec):
        workers.context()
    sys.addaudithook(_ForbidForks())
    sys.modules.pop(module, None)  # a server of the command's own may have imported it, of which runpy warns
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
        ends = [2, *sorted(descriptors), os.sysconf("SC_OPEN_MAX")]
        for low, high in itertools.pairwise(ends):
            os.closerange(low + 1, high)
        exec(arguments[-1], {})
    finally:
        os._exit(0)


class _ForbidForks:
    """An audit hook for this process, not for those it starts."""

    def __init__(self):
        self.pid = os.getpid()

    def __call__(self, event: str, arguments: tuple) -> None:
        if event in ("os.fork", "os.forkpty") and os.getpid() == self.pid:
            raise RuntimeError("a process that has threads was about to fork")


def server():
    """The server of this process, with the libraries. Call it before anything else starts one without them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    path = os.pathsep.join(map(str, (Path(__file__).parent, Path(__file__).parents[2])))
    with mock.patch.dict(os.environ, environment(), PYTHONPATH=path):
        multiprocessing.forkserver.ensure_running()
    return context


class Running:
    """Processes of one command, one for each rank, with their output so far."""

    def __init__(self, module: str, flags, ranks: int, folder: Path, env: dict[str, str] | None):
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = folder / "stdout", folder / "stderr"
        for path in (self.out, self.err):
            path.write_text("")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        group = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        context, argv = server(), [str(flag) for flag in flags]
        changed = {name: env.get(name) for name in {*os.environ, *env}} if env else {}
        self.processes = []
        for rank in range(ranks):
            places = {**group, "RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}
            variables = without_kernel() | changed | {key: str(value) for key, value in places.items()}
            arguments = (module, argv, variables, str(self.out), str(self.err))
            process = context.Process(target=_run, args=arguments)
            process.start()
            self.processes.append(process)

    def alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def signal(self, number: int) -> None:
        for process in self.processes:
            os.kill(process.pid, number)

    def kill(self) -> None:
        """As a machine that goes down would."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()

    def wait(self, timeout: float = HANG_AFTER) -> subprocess.CompletedProcess:
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        if self.alive():
            self.kill()
            raise TimeoutError(self.out.read_text()[-2000:] + self.err.read_text()[-4000:])
        codes = [process.exitcode for process in self.processes]
        return subprocess.CompletedProcess(
            [], next((code for code in codes if code), 0), self.out.read_text(), self.err.read_text()
        )


def start(module: str, *flags, ranks: int = 1, folder: Path, env: dict[str, str] | None = None) -> Running:
    """Start a command. env: its variables, set after the libraries were imported."""
    return Running(module, flags, ranks, folder, env)


def call(
    module: str, *flags, ranks: int = 1, check: bool = True, folder: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    done = start(module, *flags, ranks=ranks, folder=folder, env=env).wait()
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def in_a_forked_child(compute, timeout: float = 60):
    """What `compute()` gives in a child that is forked from this process, with whatever threads that has lost."""
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
    pids = []
    with contextlib.suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            pids += [child, *descendants(child)]
    return pids


def still_there(pids, seconds: float = 120) -> list[int]:
    """The processes that still run; none, sooner or later."""
    end = time.monotonic() + seconds
    while True:
        running = []
        for pid in pids:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
                    running.append(pid)
        if not running or time.monotonic() > end:
            return running
        time.sleep(0.02)


@contextlib.contextmanager
def signals_kept():
    """A trainer in this process sets handlers; take them back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
