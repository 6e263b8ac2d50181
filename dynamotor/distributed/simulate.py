"""A step of data-parallel training predicted from one rank's timings and an alpha-beta model of the link.
Always a simulation.

>>> link = Link(bandwidth=25e9 / 8, latency=20e-6)
>>> step = simulate(Profile(0.010, 0.020, ready=(0.006, 0.020), nbytes=(25 << 20, 25 << 20)), link, world=64)
>>> step.seconds, step.exposed
"""

from __future__ import annotations

from collections.abc import Sequence
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
class Sample:
    """A measured all-reduce on a link of stated bandwidth (bytes a second) and latency (seconds)."""

    world: int
    nbytes: int
    bandwidth: float
    latency: float
    seconds: float


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


def calibrate(samples: Sequence[Sample], held_out: Sequence[Sample] = ()) -> Link:
    """Fit efficiency and overhead to measurements (least squares of relative errors) and tell the error on
    others.

    Without `held_out`, every second sample is held out, and the returned fit is of all.
    """
    fitted, tested = (samples, held_out) if held_out else (samples[::2], samples[1::2])
    link = _fit(fitted)
    error = (
        sum(abs(_at(link, s).all_reduce(s.nbytes, s.world) / s.seconds - 1) for s in tested) / len(tested)
        if tested
        else None
    )
    return replace(link if held_out else _fit(samples), error=error)


def _at(link: Link, sample: Sample) -> Link:
    return link.at(sample.bandwidth, sample.latency)


def _fit(samples: Sequence[Sample]) -> Link:
    """Solve seconds = hops (latency + overhead) + hops / world · nbytes / (bandwidth · efficiency) for the
    two unknowns.
    """
    aa = ab = bb = ay = by = 0.0
    for s in samples:
        hops = 2 * (s.world - 1)
        a, b, y = (
            hops / s.seconds,
            hops / s.world * s.nbytes / s.bandwidth / s.seconds,
            1 - hops * s.latency / s.seconds,
        )
        aa, ab, bb, ay, by = aa + a * a, ab + a * b, bb + b * b, ay + a * y, by + b * y
    determinant = aa * bb - ab * ab
    if abs(determinant) < 1e-12 * max(aa * bb, 1e-300):
        overhead, inverse = 0.0, by / bb if bb else 1.0
    else:
        overhead, inverse = (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant
    if overhead < 0.0 or inverse <= 0.0:
        overhead, inverse = max(0.0, ay / aa) if inverse <= 0.0 else 0.0, by / bb if bb else 1.0
    return Link(samples[0].bandwidth, samples[0].latency, 1 / inverse, overhead)
