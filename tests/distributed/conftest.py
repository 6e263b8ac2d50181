"""The pair of processes that these tests share."""

from ddp_pair import _pairs, pair  # noqa: F401
