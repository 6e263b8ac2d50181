"""A table that keeps the entries used last, so that programs that never settle do not fill the memory.

>>> table = Recent(2); table["a"] = 1; table["b"] = 2; table.get("a"); table["c"] = 3
>>> list(table)
['a', 'c']
"""

from __future__ import annotations

from typing import Any


class Recent(dict):
    """A dict of at most `limit` entries; the entry read or written longest ago goes first. `forgotten`: how
    many went.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.forgotten = limit, 0

    def get(self, key: Any, default: Any = None) -> Any:
        """The entry, which is now the latest."""
        if key not in self:
            return default
        value = self.pop(key)
        super().__setitem__(key, value)
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        while len(self) > self.limit:
            del self[next(iter(self))]
            self.forgotten += 1
