"""Dinic's maximum flow, for the cut that says which values the forward saves.

>>> net = FlowNetwork(2); net.edge(0, 1, 5); net.max_flow(0, 1)
5
"""

from __future__ import annotations

from collections import deque


class FlowNetwork:
    """A directed network over nodes 0..n-1 with non-negative capacities."""

    def __init__(self, n: int) -> None:
        self.out: list[list[int]] = [[] for _ in range(n)]
        self.to: list[int] = []
        self.capacity: list[float] = []

    def edge(self, a: int, b: int, capacity: float) -> None:
        """Add an edge a → b; edge i and its reverse i ^ 1 stand side by side."""
        for start, end, room in ((a, b, capacity), (b, a, 0)):
            self.out[start].append(len(self.to))
            self.to.append(end)
            self.capacity.append(room)

    def max_flow(self, source: int, sink: int) -> float:
        """The value of the maximum flow; capacities become the residual."""
        total = 0.0
        while (level := self._levels(source))[sink] >= 0:
            at = [0] * len(self.out)
            while pushed := self._augment(source, sink, level, at):
                total += pushed
        return total

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self.out)
        level[source] = 0
        queue = deque([source])
        while queue:
            a = queue.popleft()
            for e in self.out[a]:
                b = self.to[e]
                if level[b] < 0 and self.capacity[e] > 0:
                    level[b] = level[a] + 1
                    queue.append(b)
        return level

    def _augment(self, source: int, sink: int, level: list[int], at: list[int]) -> float:
        """Push flow along one shortest path (iterative depth-first search); 0 when there is none."""
        path: list[int] = []
        a = source
        while a != sink:
            edges, i = self.out[a], at[a]
            while i < len(edges):
                e = edges[i]
                if self.capacity[e] > 0 and level[self.to[e]] == level[a] + 1:
                    break
                i += 1
            at[a] = i
            if i < len(edges):
                path.append(edges[i])
                a = self.to[edges[i]]
            elif path:
                a = self.to[path.pop() ^ 1]
                at[a] += 1
            else:
                return 0.0
        pushed = min(self.capacity[e] for e in path)
        for e in path:
            self.capacity[e] -= pushed
            self.capacity[e ^ 1] += pushed
        return pushed

    def reachable(self, source: int) -> list[bool]:
        """The nodes on the source's side of the minimum cut, after `max_flow`."""
        return [level >= 0 for level in self._levels(source)]
