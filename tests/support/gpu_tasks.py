"""Tasks that end in every way a task can. tests/bench runs them in processes of their own: import nothing heavy."""

import os
import time


def finishes(settings, progress):
    progress.row(device=settings.device)
    progress.note(process=os.getpid())


def raises(settings, progress):
    progress.row(found="before")
    raise RuntimeError("device-side assert")


def dies(settings, progress):
    progress.row(found="before")
    os._exit(7)


def hangs(settings, progress):
    progress.row(found="before")
    time.sleep(600)
