"""What a program asks about a TPU host, answered by jax; 0 and "" where there is none."""

from __future__ import annotations

import os

import jax


def _tpus() -> list[jax.Device]:
    return [d for d in jax.local_devices() if d.platform == "tpu"]


def num_available_devices() -> int:
    """How many TPU devices this host has."""
    return len(_tpus())


def num_available_chips() -> int:
    """How many TPU chips this host has."""
    return len({getattr(d, "coords", d.id) and tuple(d.coords) for d in _tpus()})


def num_logical_cores_per_chip() -> int:
    """Devices a chip; 1 without TPUs."""
    return num_available_devices() // num_available_chips() if _tpus() else 1


def num_expected_global_devices() -> int:
    """The number of devices of all hosts."""
    return jax.device_count() if _tpus() else 0


def version() -> int:
    """The generation: 4 for "TPU v4"; 0 without TPUs."""
    digits = [c for c in (_tpus()[0].device_kind if _tpus() else "") if c.isdigit()]
    return int(digits[0]) if digits else 0


def get_tpu_type() -> str:
    """The kind of TPU as jax names it; "" without one."""
    return _tpus()[0].device_kind if _tpus() else ""


def task_id() -> int:
    """This host's number, as the environment gives it."""
    return int(os.environ.get("CLOUD_TPU_TASK_ID", os.environ.get("TPU_WORKER_ID", jax.process_index())))


worker_id = task_id


def get_worker_ips() -> list[str]:
    """The addresses of the hosts, as the environment gives them (TPU_WORKER_HOSTNAMES)."""
    return os.environ.get("TPU_WORKER_HOSTNAMES", "localhost").split(",")


def num_tpu_workers() -> int:
    """How many hosts there are."""
    return len(get_worker_ips())


def discover_master_worker_ip() -> str:
    """The address of the first host."""
    return get_worker_ips()[0]
