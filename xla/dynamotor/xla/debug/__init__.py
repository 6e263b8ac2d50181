"""Looking inside: counters and times, profiles, and why graphs were compiled or cut."""

from . import analysis, metrics, profiler

__all__ = ["analysis", "metrics", "profiler"]
