"""Schedulers: which sequences are resident, and which of them take part in a step."""

from __future__ import annotations

from specdec_fast.config import EngineConfig
from specdec_fast.errors import ConfigError
from specdec_fast.schedulers.base import Scheduler
from specdec_fast.schedulers.eqspec import EqspecScheduler
from specdec_fast.schedulers.exspec import ExspecScheduler

SCHEDULERS: dict[str, type[Scheduler]] = {"eqspec": EqspecScheduler, "exspec": ExspecScheduler}

__all__ = ["SCHEDULERS", "Scheduler", "make_scheduler"]


def make_scheduler(config: EngineConfig) -> Scheduler:
    """Build the scheduler that ``config.method`` names.

    Raises:
        ConfigError: there is no such method; the message lists the known ones.
    """
    if config.method not in SCHEDULERS:
        raise ConfigError(f"method={config.method!r}: expected one of {', '.join(SCHEDULERS)}.")
    return SCHEDULERS[config.method](config)
