"""A step of data-parallel training predicted from one rank's timings and an alpha-beta model of the link.
Always a simulation.

>>> link = Link(bandwidth=25e9 / 8, latency=20e-6)
>>> step = simulate(Profile(0.010, 0.020, ready=(0.006, 0.020), nbytes=(25 << 20, 25 << 20)), link, world=64)
>>> step.seconds, step.exposed
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Link:
    """A link between neighbours: bytes a second and seconds a message, as stated, and what calibration made
    of them.

    efficiency: the part of the stated bandwidth that all-reduces reach. overhead: seconds a message beyond
    the stated latency. error: the mean relative error on measurements that the fit did not see; None when
    nothing was measured.
    """

    bandwidth: float
    latency: float = 0.0
    efficiency: float = 1.0
    overhead: float = 0.0
    error: float | None = None

    def all_reduce(self, nbytes: int, world: int) -> float:
        """Seconds of a ring all-reduce: 2 (world - 1) messages, each of a part of the bytes."""
        hops = 2 * (world - 1)
        return hops * (self.latency + self.overhead) + hops / world * nbytes / (
            self.bandwidth * self.efficiency
        )

    def at(self, bandwidth: float, latency: float) -> Link:
        """The same link with another stated speed."""
        return replace(self, bandwidth=bandwidth, latency=latency)


@dataclass(frozen=True, slots=True)
class Profile:
    """One rank's step without communication: seconds, and when each bucket is ready, counted from the start
    of the backward.
    """

    forward: float
    backward: float
    ready: tuple[float, ...]
    nbytes: tuple[int, ...]

    def at_the_end(self) -> Profile:
        """The same step when no bucket is ready before the backward has ended."""
        return replace(self, ready=(self.backward,) * len(self.ready))


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """`rows`: (ready, start, end) of each bucket in seconds from the start of the backward. exposed: what
    communication adds.
    """

    seconds: float
    exposed: float
    rows: tuple[tuple[float, float, float], ...]


def simulate(profile: Profile, link: Link, world: int) -> SimulatedStep:
    """Buckets go over the link one after the other, each once it is ready; the backward does not slow down
    for them.
    """
    rows: list[tuple[float, float, float]] = []
    free = 0.0
    for ready, nbytes in zip(profile.ready, profile.nbytes, strict=True):
        start = max(ready, free)
        free = start + link.all_reduce(nbytes, world)
        rows.append((ready, start, free))
    exposed = max(0.0, free - profile.backward)
    return SimulatedStep(profile.forward + profile.backward + exposed, exposed, tuple(rows))
