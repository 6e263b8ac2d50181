"""Devices that bring their own PJRT library: what jax finds by its entry points or by
PJRT_NAMES_AND_LIBRARY_PATHS.

>>> plugins.register_plugin("MYDEVICE", MyPlugin())     # before the first use of the device
"""

from __future__ import annotations

import os
from importlib import metadata

_registered: dict[str, DevicePlugin] = {}


class DevicePlugin:
    """A kind of device. Subclasses say where its library is, and how processes share its chips."""

    def library_path(self) -> str:
        """The PJRT library; "" for one that jax has or finds itself."""
        return ""

    def host_index(self) -> int:
        """This host's number among the hosts."""
        return 0

    def physical_chip_count(self) -> int:
        """How many chips this host has."""
        return 0

    def configure_single_process(self) -> None:
        """Called before one process uses all chips."""

    def configure_multiprocess(self, local_rank: int, local_world_size: int) -> int:
        """Called in each of several processes; returns how many processes there are on this host."""
        return local_world_size

    def client_create_options(self) -> dict[str, object]:
        """Options for the library's client."""
        return {}

    def requires_xla_coordinator(self) -> bool:
        """Whether processes of several hosts meet at `jax.distributed`'s service: always here."""
        return True


def use_dynamic_plugins() -> None:
    """Accepted: plugins are always looked for."""
    os.environ.setdefault("PJRT_DYNAMIC_PLUGINS", "1")


def using_dynamic_plugins() -> bool:
    """Whether `use_dynamic_plugins` was called, or the variable PJRT_DYNAMIC_PLUGINS is set."""
    return os.environ.get("PJRT_DYNAMIC_PLUGINS", "0") != "0"


def default() -> DevicePlugin:
    """The plugin of the device type in use (PJRT_DEVICE); a plain one where none was registered for it."""
    return _registered.get(os.environ.get("PJRT_DEVICE", ""), DevicePlugin())


def register_plugin(name: str, device_plugin: DevicePlugin) -> None:
    """Offer a plugin under a device type. Its library is known to jax from its start on: register it before
    the first use.
    """
    _registered[name.upper()] = device_plugin
    if device_plugin.library_path():
        known = os.environ.get("PJRT_NAMES_AND_LIBRARY_PATHS", "")
        row = f"{name.lower()}:{device_plugin.library_path()}"
        os.environ["PJRT_NAMES_AND_LIBRARY_PATHS"] = f"{known},{row}" if known else row


def register_installed_plugins() -> None:
    """Register those that installed packages offer under the entry point `torch_xla.plugins`."""
    for point in metadata.entry_points(group="torch_xla.plugins"):
        register_plugin(point.name, point.load()())
