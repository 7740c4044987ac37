"""Decides what the engine computes next: queues, pages, batches, results. Knows neither text nor HTTP nor devices."""

from .config import SchedulerConfig
from .io import FollowerIO, SchedulerIO, ZmqIO
from .scheduler import Scheduler
from .stats import Stats

__all__ = ["FollowerIO", "Scheduler", "SchedulerConfig", "SchedulerIO", "Stats", "ZmqIO"]
