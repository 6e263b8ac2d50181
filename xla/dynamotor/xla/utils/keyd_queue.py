"""Queues between threads that can be closed: a reader of a closed, empty queue gets None.

>>> queue = Queue(maxsize=4); queue.put(1); queue.close_write(); queue.get(), queue.get()
(1, None)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class _Closable:
    def __init__(self, maxsize: int = 1024) -> None:
        self._maxsize, self._ready = max(1, maxsize), threading.Condition()
        self._open = self._writable = True
        self._items: Any = deque()

    def max_size(self) -> int:
        """How many items are kept."""
        return self._maxsize

    def close(self) -> None:
        """Nothing more is read or written; who waits goes on."""
        with self._ready:
            self._open = self._writable = False
            self._ready.notify_all()

    def close_write(self) -> None:
        """Nothing more is written; present entries can be read."""
        with self._ready:
            self._writable = False
            self._ready.notify_all()

    def _put(self, add: Callable[[], None]) -> bool:
        """Add an item when there is a free place; False where the queue was closed."""
        with self._ready:
            self._ready.wait_for(lambda: not self._writable or len(self._items) < self._maxsize)
            if self._writable:
                add()
            self._ready.notify_all()
            return self._writable

    def _get(self, there: Callable[[], Any], take: Callable[[], Any]) -> Any:
        """Take an item when it comes; None where the queue was closed without it."""
        with self._ready:
            self._ready.wait_for(lambda: not self._writable or there())
            self._ready.notify_all()
            return take() if self._open and there() else None


class KeydQueue(_Closable):
    """Items by key: each is read once, by whoever asks for its key."""

    def __init__(self, maxsize: int = 1024) -> None:
        super().__init__(maxsize)
        self._items = {}

    def put(self, key: Any, item: Any) -> bool:
        """Add an item when there is a place; False where the queue was closed."""
        return self._put(lambda: self._items.__setitem__(key, item))

    def get(self, key: Any) -> Any:
        """The item of a key, when it comes; None where the queue was closed without it."""
        return self._get(lambda: key in self._items, lambda: self._items.pop(key))


class Queue(_Closable):
    """Items in order."""

    def put(self, item: Any) -> bool:
        """Add an item when there is a place; False where the queue was closed."""
        return self._put(lambda: self._items.append(item))

    def get(self) -> Any:
        """The oldest item, when there is one; None where the queue was closed and nothing is left."""
        return self._get(lambda: self._items, lambda: self._items.popleft())
