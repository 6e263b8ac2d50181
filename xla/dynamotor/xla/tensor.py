"""The `xla` tensor: a torch.Tensor without storage whose value is a node of its device's trace.

Tensors that share memory share a *root*; each view is a replayable chain of view ops over it. An in-place
write records the functional op and scatters the result back along the chain, and every other view of the root
is replayed when it is next read.

>>> x = torch.ones(2, 3, device="xla")
>>> x[0].add_(1)
>>> x.cpu()
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import torch
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import TypeIs

from dynamotor.extension_api import Deferred, Dim, Dims, MaybeNone, Registry, checked, contiguous_stride

from . import compat, metrics
from .errors import require
from .ir import Lane, Meta, Node, XlaError, lock, overfull, record

aten = torch.ops.aten
# The stub says that it makes a Tensor.
_make, _strided = cast(Any, compat.make_wrapper_subclass), torch.strided


class Alias:
    """One view of one piece of memory. A root has no parent and holds the value; a view caches what its chain
    gives for a version of the root. `stride` (None: row-major) and `offset` are what its tensors report
    (layout.py)."""

    __slots__ = (
        "root",
        "parent",
        "func",
        "args",
        "kwargs",
        "meta",
        "node",
        "version",
        "queued",
        "stride",
        "offset",
        "viewed",
        "turned",
    )
    root: Alias | MaybeNone  # None for a root
    parent: Alias | MaybeNone  # None for a root

    def __init__(
        self,
        node: Node,
        parent: Alias | None = None,
        func: Any = None,
        args: tuple = (),
        kwargs: Any = None,
        stride: Dims | None = None,
        offset: Dim = 0,
    ) -> None:
        self.node, self.meta, self.parent = node, node.meta, parent
        self.func, self.args, self.kwargs = func, args, kwargs
        self.stride, self.offset = stride, offset
        # None for a root: a reference to itself would keep it alive, and live tensors are computed.
        if parent is None:
            self.root = None
            self.version = 0
            self.viewed = self.turned = False  # turned: its views cannot be made again, as `check_views` says
        else:
            self.root = root = parent.root or parent
            self.version = root.version
            root.viewed = True
        node.owners += 1
        self.queued = -1

    @property
    def lane(self) -> Lane:
        return self.node.lane


def value(alias: Alias) -> Node:
    """The node that an alias now stands for; views of a root that was written since are replayed."""
    root, node = alias.root, alias.node
    if (
        root is None
        or alias.version == root.version
        and (node.data is not None or node.epoch == node.lane.epoch)
    ):
        return node
    alias.node = node = record(alias.func, (value(alias.parent), *alias.args), alias.kwargs)
    alias.version = root.version
    node.owners += 1
    return node


def new_root(node: Node, stride: Dims | None = None) -> Alias:
    """XlaStorage of its own for a value; `stride` is what its tensors report (None: row-major)."""
    root = Alias(node, stride=stride)
    if node.data is None:
        queue(root)
    return root


def queue(root: Alias) -> None:
    """Remember that the root holds a pending value: the flush computes it if the root is still alive by
    then.
    """
    lane = root.node.lane
    if root.queued != lane.epoch:
        root.queued = lane.epoch
        lane.pending.append(root)


Inverse = Callable[..., Node]
# View overload -> `rule(base, new, *args, **kwargs) -> Node`: the base after its view was set to `new`.
inverses: Registry[Any, Inverse] = Registry("inverse of a view")


def write(alias: Alias, node: Node) -> None:
    """Replace an alias's value in place: scatters back along its chain to the root."""
    if node.meta is not alias.meta:
        node = _fit(node, alias.meta)
    if alias.parent is not None:
        _write_back(alias, node)
        return
    old = alias.node
    old.owners -= 1
    if old.data is not None and old.epoch == old.lane.epoch:
        old.lane.replaced.append(old)
    alias.node = node
    node.owners += 1
    alias.version += 1
    if node.data is None:
        queue(alias)


def _write_back(alias: Alias, node: Node) -> None:
    try:
        write(
            alias.parent,
            inverses[alias.func](value(alias.parent), node, *alias.args, **(alias.kwargs or {})),
        )
    except Overlap:
        write_through(alias, node)
    alias.node, alias.version = node, alias.root.version
    node.owners += 1


class Overlap(XlaError):
    """DM611: a write to a view in which elements share memory. A part of it, whose elements do not, can be
    written.
    """


# Defined by storage.py: writes a view by its strides; raises Overlap where its own elements share memory.
write_through = Deferred[[Alias, Node], None]("write_through")


def _fit(node: Node, meta: Meta) -> Node:
    """Cast and broadcast a value to the type and shape of the written tensor."""
    if node.meta.dtype is not meta.dtype:
        node = record(aten._to_copy.default, (node,), {"dtype": meta.dtype})
    return node if node.meta is meta else record(aten.expand.default, (node, list(meta.shape)))


def check_views(alias: Alias, args: tuple) -> None:
    """Refuse gradients where a tensor with views got another shape in place, or has a view of memory
    beside it: behind a write, autograd makes the history of a view again, on this device by the view's op on
    its base as that is now.
    """
    if (alias.root or alias).turned and torch.is_grad_enabled():
        require(
            not any(isinstance(x, torch.Tensor) and x.requires_grad for x in args),
            "DM620",
            "a tensor whose memory other views show is written, and changes its shape in place or has a view "
            "beyond itself (as_strided)",
            why="autograd on this device would take the wrong elements of its gradient",
            cure="use the out-of-place op (`x = x.t()`)",
        )


class NoStorage(XlaError, NotImplementedError):
    """DM616, as libraries expect it that look for memory that is shared (safetensors)."""


_OURS = ("_alias", "_is_param", "_mark", "__tensor_flatten__", "__tensor_unflatten__")


class XlaStorage(torch.UntypedStorage):
    """What stands for the storage of a tensor: an empty storage that says how large the memory is, and that
    can give it back and take it again.
    """

    alias: Alias
    is_free: bool

    @classmethod
    def of(cls, alias: Alias) -> XlaStorage:
        """Of a tensor with this alias."""
        memory = cls(0)
        memory.alias, memory.is_free = alias, False
        return memory

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # the stub has an attribute
        return self.alias.lane.device

    def _full_size(self) -> int:
        memory = (self.alias.root or self.alias).meta  # a view has that of its base
        return torch.Size(memory.shape).numel() * memory.dtype.itemsize

    def size(self) -> int:
        """In bytes."""
        return 0 if self.is_free else self._full_size()

    nbytes = __len__ = size

    def resize_(self, size: int) -> None:
        """Give the memory back (0), or have memory again, whose content is undefined. XlaError DM619 for
        another size, and for a view.
        """
        alias = self.alias
        if size == self.size():
            return
        require(
            alias.root is None and size in (0, self._full_size()),
            "DM619",
            "the storage of an xla tensor is resized to a part of it, or that of a view",
            cure="resize the tensor",
        )
        self.is_free = size == 0
        if self.is_free:
            alias.node.owners -= 1
            alias.node, alias.version = alias.lane.leaf(None, alias.meta), alias.version + 1
            alias.node.owners += 1
        else:
            dtype = {"dtype": alias.meta.dtype}
            write(alias, record(aten.zeros.default, (list(alias.meta.shape),), dtype, alias.lane))


_memories: Any = WeakIdKeyDictionary()


class XLATensor(torch.Tensor):
    """A tensor of the `xla` device; `_alias` is its identity. Never made by users: `torch.ones(2,
    device="xla")`, `.to("xla")`."""

    _alias: Alias
    __torch_function__ = compat.disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub has an instance method
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = handlers.get(id(func))
        if handler is None:
            handler = handlers[id(func)] = classify(func)
        if overfull and not lock._is_owned():  # type: ignore[attr-defined]  # no handler works
            relieve()
        with lock:
            return handler(func, args, kwargs)

    def __coerce_same_metadata_as_tangent__(self, metadata: Any, expected_type: Any = None) -> XLATensor:
        return self

    def _memory_token(self) -> int:
        """Says whose memory this is, for the capture's guards: views of one root give the same number."""
        alias = self._alias
        return id(alias.root or alias)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # unnamed in the stub
        text = repr(self.detach().cpu())
        marks = f", device='{self.device}'"
        if self.grad_fn is not None:
            marks += f", grad_fn=<{type(self.grad_fn).__name__}>"
        elif self.requires_grad:
            marks += ", requires_grad=True"
        kind = "Parameter containing:\n" if isinstance(self, torch.nn.Parameter) else ""
        return f"{kind}{text[:-1]}{marks})"

    def untyped_storage(self) -> Any:
        """The size of the memory, which can be given back (FSDP frees gathered parameters between uses)."""
        memory = _memories.get(self)
        if memory is None:
            memory = _memories[self] = XlaStorage.of(self._alias)
        return memory

    def storage(self) -> Any:
        raise NoStorage(
            "DM616", "XLA tensors have no storage", where=metrics.user_line(), cure="use .cpu() first"
        )

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As CUDA's: the data must be moved first, unless `force=True`."""
        torch._check_type(
            bool(force),
            lambda: (
                "can't convert xla:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                "host memory first."
            ),
        )
        return self.detach().cpu().numpy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.detach().cpu().__array__(dtype)

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As PyTorch's own tensors: a parameter stays one, and attributes are kept."""
        state = _attributes(self)
        if isinstance(self, torch.nn.Parameter):
            parts: tuple = (self.data, self.requires_grad, OrderedDict())
            if not state:
                return compat.rebuild_parameter, parts
            return compat.rebuild_parameter_with_state, (*parts, state)
        rebuild = compat.rebuild_device_tensor
        parts = (self.detach().cpu(), self.dtype, str(self.device), self.requires_grad)
        if not state:
            return rebuild, parts
        return compat.rebuild_tensor_type, (rebuild, XLATensor, parts, state)

    def __dlpack__(self, **options: Any) -> Any:
        return self.detach().cpu().__dlpack__()

    def __dlpack_device__(self) -> tuple[Any, int]:
        return (1, 0)

    @property
    def data(self) -> XLATensor:
        return wrap(
            self._alias
        )  # not detach(): that shares the version counter, and writes to `data` are not autograd's business

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        compat.TensorBase.data.__set__(self, other)
        self._alias = checked(XLATensor, other)._alias

    def __deepcopy__(self, memo: dict[int, Any]) -> XLATensor:
        if id(self) in memo:
            return memo[id(self)]
        torch._check(
            self.is_leaf,
            lambda: (
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at "
                "the moment."
            ),
        )
        copied: Any = wrap(_copied(self._alias, memo)).requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        if isinstance(self, torch.nn.Parameter):  # PyTorch copies neither its gradient nor its attributes
            copied._is_param = True
            return copied
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        copied.__dict__.update(deepcopy(_attributes(self), memo))
        return copied


def _attributes(tensor: XLATensor) -> dict[str, Any]:
    """The attributes that the program put on a tensor."""
    return {name: kept for name, kept in tensor.__dict__.items() if name not in _OURS}


def _copied(alias: Alias, memo: dict[Any, Any]) -> Alias:
    """A deep copy: tensors that share memory share the copy of it, as they do on the CPU."""
    copy = memo.get(id(alias))
    if copy is None:
        if alias.parent is None:
            copy = new_root(value(alias), alias.stride)
            copy.offset = alias.offset
        else:
            parent = _copied(alias.parent, memo)
            copy = Alias(
                value(alias), parent, alias.func, alias.args, alias.kwargs, alias.stride, alias.offset
            )
        memo[id(alias)] = copy
        memo[id(memo)] = [*memo.get(id(memo), ()), alias]  # kept alive, so that its id stays its own
    return copy


Handler = Callable[[Any, tuple, dict[str, Any] | None], Any]
handlers: dict[
    int, Handler
] = {}  # by the overload's id: overloads live for ever, and hashing one is a call of Python code


# Defined by dispatch.py, which knows the kinds of ops.
classify = Deferred[[Any], Handler]("classify")
# Defined by sync.py: flushes the lanes that are overfull.
relieve = Deferred[[], None]("relieve")


def wrap(alias: Alias) -> XLATensor:
    """A new tensor for an alias."""
    meta, stride = alias.meta, alias.stride
    if stride is None and alias.offset:
        stride = contiguous_stride(meta.shape)
    # By position: PyTorch's parser takes half as long again for names.
    tensor = _make(
        XLATensor,
        meta.shape,
        stride,
        alias.offset or None,
        None,
        meta.dtype,
        _strided,
        alias.node.lane.device,
    )
    tensor._alias = alias
    return tensor


def maker(meta: Meta, stride: Dims | None, device: torch.device) -> Callable[[], XLATensor]:
    """Makes tensors of one kind, whose `_alias` the caller sets."""
    return functools.partial(_make, XLATensor, meta.shape, stride, None, None, meta.dtype, _strided, device)


def wrap_view(alias: Alias, base: torch.Tensor) -> XLATensor:
    """A new tensor for a view of `base`: in inference mode one that autograd knows, when it knows the
    base.
    """
    if torch.is_inference_mode_enabled() and not base.is_inference():
        with torch.inference_mode(False):
            return wrap(alias)
    return wrap(alias)


def is_xla(value: Any) -> TypeIs[XLATensor]:
    """Whether a value is a tensor of this device."""
    return type(value) is XLATensor


def node_of(tensor: XLATensor) -> Node:
    """The node that a tensor now stands for."""
    return value(tensor._alias)
