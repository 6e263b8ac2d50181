"""Results with named parts, such as `torch.return_types.max`."""

from __future__ import annotations

import types

from .base import ResultEmitter, Trace, Value
from .containers import TupleValue


class ReturnTypeValue(TupleValue):
    """A result with named parts such as `torch.return_types.max`."""

    __slots__ = ("return_type",)

    def __init__(self, return_type: type, items: list[Value]) -> None:
        super().__init__(items)
        self.return_type = return_type

    def python_type(self) -> type:
        return self.return_type

    def getitem(self, trace: Trace, key: Value) -> Value:
        return TupleValue(self.items).getitem(trace, key)

    def getattr(self, trace: Trace, name: str) -> Value:
        member = getattr(self.return_type, name, None)
        if isinstance(member, types.MemberDescriptorType):  # of a probe that holds its positions
            probe = self.return_type(range(vars(self.return_type)["n_sequence_fields"]))
            return self.items[member.__get__(probe)]
        return super().getattr(trace, name)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        emitter.return_type = self.return_type
        return f"{emitter.constant(self.return_type)}({super().reconstruct(emitter)})"
