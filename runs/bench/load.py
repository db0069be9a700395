"""The load watch: how much other processes work on this process's cores while it is timed."""

import os
import time

import psutil

SHORTEST_SECONDS = 0.3  # the kernel counts in hundredths of a second


class LoadWatch:
    """Watches from its creation on."""

    def __init__(self):
        self.wall, self.own, self.all = time.perf_counter(), time.process_time(), self._busy()

    @staticmethod
    def _busy() -> float | None:
        """Seconds of work done on these cores since the machine started; None where only Linux would say."""
        if not hasattr(os, "sched_getaffinity"):
            return None
        busy = [sum(core[:3]) + core.irq + core.softirq + core.steal for core in psutil.cpu_times(percpu=True)]
        return sum(busy[core] for core in os.sched_getaffinity(0))

    def elsewhere(self) -> float | None:
        """How many cores others kept busy; None if unknown, or if the time was too short to tell."""
        wall, busy = time.perf_counter() - self.wall, self._busy()
        if busy is None or self.all is None or wall < SHORTEST_SECONDS:
            return None
        return max(0.0, (busy - self.all - (time.process_time() - self.own)) / wall)
