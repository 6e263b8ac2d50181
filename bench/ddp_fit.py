"""A link's efficiency and overhead, fitted to measured all-reduces.

>>> link = calibrate([Sample(2, 1 << 20, 25e9 / 8, 20e-6, seconds) for seconds in measured])
>>> link.error                       # on samples that the fit did not see
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .simulate import Link


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured all-reduce on a link of stated bandwidth (bytes a second) and latency (seconds)."""

    world: int
    nbytes: int
    bandwidth: float
    latency: float
    seconds: float


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
