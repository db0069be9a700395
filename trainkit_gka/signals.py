"""Ends of a command from outside: SIGTERM, a closed terminal (SIGHUP), and output that nobody reads any more.

A command ends at once with `Stopped`. Training loops, and commands that have started other processes, set handlers that
save first or pass the signal on.
"""

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
GRACE = 5.0  # seconds that a command has to end by itself
LOST_OUTPUT = {errno.EIO}  # errors of printing that are ignored; EIO: the terminal is gone


class Stopped(SystemExit):
    """Raised by signal `number` that ends this process. The exit code is a shell's, 128 + number."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}"


def ending() -> list[signal.Signals]:
    """The signals that end a command: SIGTERM, and SIGHUP unless it is ignored, as it is under nohup."""
    return [signal.SIGTERM, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else [])]


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], None], numbers: Iterable[int] = ()) -> Iterator[None]:
    """Set `handler` for signals, by default those that end a command, within the block; does nothing in threads but the
    main one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers or ending()} if is_main else {}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def passed_on(processes: Callable[[], Iterable]) -> Iterator[None]:
    """Within the block the first signal is sent to `processes()`, subprocess.Popen objects, and raises Stopped.

    The caller waits for them then: they may save first.
    """
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            for process in processes():
                process.send_signal(number)
            raise Stopped(number)

    with handled(pass_on):
        yield


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Within the block a signal that ends a command raises Stopped in the main thread.

    After GRACE seconds the process ends in any case: the main thread may be in a library's call that takes long, or
    that waits for another process. Stopped replaces an error that a library made of it. Handlers set inside the block
    replace this one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if not received:
            received.append(number)
            raise Stopped(number)

    def watch(numbers: int) -> None:
        while number := os.read(numbers, 1):
            if signal.getsignal(number[0]) is stop:
                time.sleep(GRACE)
                if signal.getsignal(number[0]) is stop:
                    say(Stopped(number[0]))
                    end_with_children(128 + number[0])
        os.close(numbers)

    try:
        with watched(watch), handled(stop):
            yield
    except Exception as error:
        if not received:
            raise
        raise Stopped(received[0]) from error


@contextlib.contextmanager
def watched(watch: Callable[[int], None]) -> Iterator[None]:
    """Within the block `watch` runs in a thread. It gets a file descriptor to read the numbers of signals from, a byte
    each, which it closes when there is nothing more to read.

    A number is there at the signal itself, also while the main thread is in a library's call and runs no handler.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, args=(reader,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


def end_with_children(code: int) -> None:
    """End this process at once, whatever it does, and those that it has started, such as compilers."""
    children: list[int] = []
    with contextlib.suppress(Exception):  # nothing may keep it from ending
        import psutil

        children = [child.pid for child in psutil.Process().children(recursive=True)]
    sys.setswitchinterval(60)  # from here on no other thread runs: one that waited for a child would go on
    for child in children:
        if child != resource_tracker._resource_tracker._pid:  # which cleans up when this process has ended
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
    os._exit(code)


def say(stopped: Stopped) -> None:
    """Print the line of a stopped command, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            print(stopped, file=sys.stderr, flush=True)


class _Output(io.FileIO):
    """Standard output or error; it becomes the null device when nothing reads it any more."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in LOST_OUTPUT:
                raise
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
            return len(data)


def keep_output() -> None:
    """Let printing go on when the terminal is gone. Streams that replace standard output and error stay as they are."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        raw = _Output(stream.fileno(), "w", closefd=False)
        options = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
        buffer = raw if stream.write_through else io.BufferedWriter(raw)  # as Python does for unbuffered output
        setattr(sys, name, io.TextIOWrapper(buffer, **options))


def outlive_readers() -> None:
    """Let printing go on, too, when the reader of a pipe has ended: training does not end with its `tee`."""
    LOST_OUTPUT.add(errno.EPIPE)
