"""By how much a process grows at most, for figures of whole engines: in a process of its own."""

from __future__ import annotations

import re
from pathlib import Path

from specdec_fast.freed_memory import return_freed_memory

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # Linux only
RESET_PEAK = "5"  # resets VmHWM; see proc_pid_clear_refs(5)


class PeakMemory:
    """The peak of this process's resident memory since it was made or restarted."""

    def __init__(self) -> None:
        return_freed_memory()
        self._before = status_bytes("VmRSS") if RESET.exists() else 0
        self.restart()

    def restart(self) -> None:
        """Forget the peak, and count from now on; what the process had at first stays that."""
        if RESET.exists():
            RESET.write_text(RESET_PEAK)

    def bytes(self) -> int | None:
        """Return the peak, without what the process had at first; None if the system does not report it."""
        return status_bytes("VmHWM") - self._before if RESET.exists() else None


def status_bytes(field: str) -> int:
    """Return a field of ``/proc/self/status`` in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{STATUS} has no {field}.")
    return int(found[1]) * 1024
