"""The asynchronous engine: requests of event loops, served by one worker thread."""

from specdec_fast.service.async_engine import AsyncEngine
from specdec_fast.service.statistics import RequestRecord, ServiceStats
from specdec_fast.service.streams import AsyncStream

__all__ = ["AsyncEngine", "AsyncStream", "RequestRecord", "ServiceStats"]
