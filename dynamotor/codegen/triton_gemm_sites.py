"""Where a program has a matrix product that a template could compute, and the program with one in its place.

>>> for site in find_sites(program): print(site.label())
bf16 1x4096x3072x768 nt+bias > add,erf,mul reads nothing writes bf16
>>> program = put(program, site, Tiling(128, 128, 64))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base.events import counters
from ..graph.spec import TensorSpec, aten
from ..lower.ir import Expr, Reduce, Store, loads_of, walk
from ..lower.program import (
    Buffer,
    BufRef,
    ExternStep,
    Program,
    Step,
    reads_of,
    refs,
    touches,
    writes_of,
)
from .triton import TritonStep
from .triton_computed import computed
from .triton_conv import convolution
from .triton_few_rows import few_rows
from .triton_gemm import Tiling, draft_in_parts, emit_product
from .triton_product import Operand, Product, over_tile
from .triton_sizes import settle

_FLOATS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
_SCRATCH_SLACK = 64  # bytes: buffers are multiples of 64, and a launch rounds this one's start up to 128
# target -> positions of (a, b, bias)
_PRODUCTS = {
    aten.mm.default: (0, 1, None),
    aten.bmm.default: (0, 1, None),
    aten.addmm.default: (1, 2, 0),
    aten.baddbmm.default: (1, 2, 0),
}


_SourceOf = Callable[[Store, Product, Operand], Expr | None]  # ops of a store that makes a product's operand


@dataclass(frozen=True, slots=True)
class Site:
    """A product at step `at`; with its epilogue at step `consumer`, and what casts or pads its operands at
    `makers`.
    """

    at: int
    product: Product
    consumer: int | None = None
    makers: tuple[int, ...] = ()
    plain: Site | None = None  # the same without the casts; parts of few rows: without the consumer

    def variants(self) -> tuple[Site, ...]:
        """The ways in which a template may take this place, the one that fuses most first."""
        return (self, *(self.plain.variants() if self.plain is not None else ()))

    def steps(self) -> tuple[int, ...]:
        """The steps that the template takes the place of, in order."""
        return (*sorted(self.makers), self.at, *([self.consumer] if self.consumer is not None else []))

    def label(self) -> str:
        """The facts that decide its speed, readable: types, sizes, layouts and fused ops."""
        p = self.product
        sizes = "x".join(str(n) for n in p.size)
        layout = "".join("n" if o.stride[2] == 1 else "t" if o.stride[1] == 1 else "s" for o in (p.a, p.b))
        casts = "".join(f" cast {_FLOATS[o.dtype]}" for o in (p.a, p.b) if o.dtype != p.compute)
        extra = (
            f"{'+bias' if p.bias else ''}{casts}{' keep' if p.stored and self.consumer is not None else ''}"
        )
        window = f" {p.window}" if p.window is not None else ""
        parts = " in parts" if p.in_parts else ""
        parts += f" of {_types(p.computed)}" if p.computed else ""
        parts += " twice" if p.beside else ""
        return f"{_FLOATS[p.compute]} {sizes} {layout}{window}{parts}{extra}{_work(p)}"


def _work(product: Product) -> str:
    """The ops, reads (beside the product) and writes of an epilogue, in a few words."""
    if not product.epilogue:
        return ""
    exprs = walk(*(s.expr for s in product.epilogue))
    ops = sorted({e.op for e in exprs} - {"load", "const", "index", "round_to"})
    reads = sorted(_short(e.args[2]) for e in exprs if e.op == "load" and e.args[0] not in product.outs)
    writes = sorted(_short(s.memory) for s in product.epilogue)
    return f" > {','.join(ops) or 'copy'} reads {','.join(reads) or 'nothing'} writes {','.join(writes)}"


def _types(computed: Iterable[Expr]) -> str:
    """The types that weights are computed from."""
    return ",".join(sorted({_short(e.args[2]) for expr in computed for e in loads_of(expr)}))


def _short(dtype: torch.dtype) -> str:
    return _FLOATS.get(dtype, str(dtype).removeprefix("torch."))


def find_sites(program: Program, tf32: bool = False) -> list[Site]:
    """Every product in order, with as much around it as can be fused. tf32: float32 products may round their
    operands so.
    """
    found, flow = [], _Flow(program)
    for at, step in enumerate(program.steps):
        convolved = convolution(program, step)
        product = convolved or few_rows(program, step) or _product(program, step, tf32)
        if product is not None:
            plain = _with_consumer(program, flow, Site(at, product))
            if convolved is not None and plain.consumer is None:  # what pays is the kernel behind it
                continue
            if product.in_parts:
                alone = _with_computed(program, flow, Site(at, product))
                joined = _with_computed(program, flow, plain)
                found.append(replace(joined, plain=alone) if joined.consumer is not None else alone)
                continue
            plain = _with_sources(program, flow, plain, _padded_from)
            cast = _with_sources(program, flow, plain, _cast_from)
            found.append(replace(cast, plain=plain) if cast is not plain else plain)
    return found


def _product(program: Program, step: Step, tf32: bool) -> Product | None:
    """The product that an extern step computes, if a template can."""
    if not isinstance(step, ExternStep) or step.out_variant is None or step.target not in _PRODUCTS:
        return None
    a, b, bias = (None if n is None else step.args[n] for n in _PRODUCTS[step.target])
    plain = all(value == 1 for value in step.kwargs.values()) and len(step.args) == (2 if bias is None else 3)
    out = step.outs[0]
    if not plain or out is None or a is None or b is None:
        return None
    result = BufRef.whole(program.buffers[out])
    operands = [a, b, result, *([bias] if bias is not None else [])]
    dtypes = {r.dtype for r in operands} | {program.buffers[r.name].spec.dtype for r in operands}
    if len(dtypes) != 1 or not dtypes <= _FLOATS.keys() or (dtypes == {torch.float32} and not tf32):
        return None
    if 0 in (*a.shape, *b.shape) or any(r.name == out for r in operands if r is not result):
        return None
    batch = a.shape[0] if len(a.shape) == 3 else 1
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    shapes = [(batch, m, k), (batch, k, n), (batch, m, n), (batch, m, n)]
    found = [_operand(r, shape) for r, shape in zip(operands, shapes)]
    return Product(
        (batch, m, n, k), found[0], found[1], found[3] if bias is not None else None, found[2], result.dtype
    )


def _operand(ref: BufRef, shape: tuple[int, ...]) -> Operand:
    """The reference broadcast to three dimensions."""
    sizes = (1,) * (3 - len(ref.shape)) + ref.shape
    steps = (0,) * (3 - len(ref.shape)) + ref.stride
    stride = tuple(0 if have == 1 else s for have, s in zip(sizes, steps, strict=True))
    assert all(have in (1, want) for have, want in zip(sizes, shape, strict=True))
    return Operand(ref.name, ref.dtype, ref.offset, stride)  # type: ignore[arg-type]


class _Flow:
    """Which steps of a program read and write each buffer, in order, and which buffers the caller sees."""

    def __init__(self, program: Program) -> None:
        self.readers: dict[str, list[int]] = {}
        self.writers: dict[str, list[int]] = {}
        self.results = {ref.name for ref in refs(program.outputs)} | set(program.mutations)
        for n, step in enumerate(program.steps):
            for name in reads_of(step):
                self.readers.setdefault(name, []).append(n)
            for name in writes_of(step):
                self.writers.setdefault(name, []).append(n)

    def is_written(self, name: str, after: int, until: int) -> bool:
        """Whether a step behind `after` up to `until` writes a buffer."""
        return any(after < n <= until for n in self.writers.get(name, ()))


def _is_map(step: Step) -> bool:
    """Whether a step is one launch over independent elements."""
    if (
        not isinstance(step, TritonStep)
        or step.function is None
        or step.function.checks
        or step.kernel is None
    ):
        return False
    return not any(isinstance(s, Reduce) for s in step.kernel.statements())


def _with_consumer(program: Program, flow: _Flow, site: Site) -> Site:
    """The site with the kernel that reads the product first, where that can be its epilogue."""
    product, out = site.product, site.product.out.buffer
    readers = flow.readers.get(out)
    if not readers:
        return site
    at = readers[0]
    if at < site.at or not _is_map(program.steps[at]):
        return site
    step = program.steps[at]
    assert isinstance(step, TritonStep)
    touched = (*product.operands(), product.out)
    if any(flow.is_written(o.buffer, site.at, at) or _disagrees(step, o) for o in touched):
        return site
    found = _beside(program, flow, site, at)
    if found is not None:
        other, beside = found
        fused = over_tile(replace(product, stored=False, beside=(beside.a, beside.out)), step.kernel)
        if fused is not None:
            return replace(site, product=fused, consumer=at, makers=(other,))
    fused = over_tile(product, step.kernel)
    if fused is None:
        return site
    stored = len(readers) > 1 or out in flow.results
    if stored and fused.size != product.size:  # others read columns that this kernel does not
        return site
    return replace(site, product=replace(fused, stored=stored), consumer=at)


def _beside(program: Program, flow: _Flow, site: Site, consumer: int) -> tuple[int, Product] | None:
    """Another product in one part of the same rows, whose result nothing but the same kernel reads (the other
    half of a gate), and its step; None where there is none, or the results are read elsewhere.
    """
    product = site.product
    if not product.in_parts or product.size[0] > 1 or product.more:
        return None
    for name in sorted(reads_of(program.steps[consumer]) - {product.out.buffer}):
        made = flow.writers.get(name, [])
        other = few_rows(program, program.steps[made[0]]) if len(made) == 1 else None
        if other is None or replace(other, a=product.a, out=product.out) != product:
            continue
        outs, weights = (product.out, other.out), (product.a, other.a)
        alike = other.out.stride == product.out.stride and other.a.stride == product.a.stride
        alone = all(flow.readers[o.buffer] == [consumer] and o.buffer not in flow.results for o in outs)
        first = min(site.at, made[0])
        still = not any(flow.is_written(o.buffer, first, consumer) for o in (product.b, *weights))
        in_memory = not any(flow.writers.get(w.buffer) for w in weights)
        if alike and alone and still and in_memory:
            return made[0], other
    return None


def _disagrees(step: TritonStep, operand: Operand) -> bool:
    """Whether a kernel sees a product's operand or result as another type."""
    return any(name == operand.buffer and dtype != operand.dtype for name, dtype, _ in step.kernel.params)


def _with_sources(program: Program, flow: _Flow, site: Site, source_of: _SourceOf) -> Site:
    """The site reading the sources of its operands, where the operands have no other reader."""
    names = [o.buffer for o in site.product.operands()]
    for key in ("a", "b"):
        operand: Operand = getattr(site.product, key)
        if names.count(operand.buffer) > 1:
            continue
        makers = flow.writers.get(operand.buffer, [])
        if len(makers) != 1 or flow.readers[operand.buffer] != [site.at] or operand.buffer in flow.results:
            continue
        (made,) = makers
        source = _made_from(program, made, site, key, source_of) if made < site.at else None
        if (
            source is None
            or source.buffer in site.product.buffers()
            or flow.is_written(source.buffer, made, site.steps()[-1])
        ):
            continue
        changes: dict[str, Any] = {key: source}
        site = replace(site, product=replace(site.product, **changes), makers=(*site.makers, made))
    return site


def _with_computed(program: Program, flow: _Flow, site: Site) -> Site:
    """The site computing its weights as the kernels do that make them for it alone."""
    names = {a.buffer for a, _ in site.product.pairs}
    writers = [flow.writers.get(name, []) for name in names]
    makers = tuple(sorted({n for found in writers for n in found if n < site.at}))
    steps = [program.steps[n] for n in makers]
    if any(len(found) != 1 for found in writers) or names & flow.results:
        return site
    if not all(_is_map(step) for step in steps) or any(flow.readers[name] != [site.at] for name in names):
        return site
    product = computed(site.product, [step.kernel for step in steps if isinstance(step, TritonStep)])
    sources = {name for step in steps for name in reads_of(step)}
    if product is None or any(flow.is_written(name, makers[0], site.steps()[-1]) for name in sources):
        return site
    return replace(site, product=product, makers=makers)


def _made_from(program: Program, made: int, site: Site, key: str, source_of: _SourceOf) -> Operand | None:
    """The elementwise input of a step that makes an operand, as that operand."""
    step = program.steps[made]
    operand: Operand = getattr(site.product, key)
    if not _is_map(step) or not isinstance(step, TritonStep) or len(step.writes) != 1:
        return None
    statements = list(step.kernel.statements())
    (store,) = statements if len(statements) == 1 else (None,)
    if not isinstance(store, Store) or len(loads_of(store.expr)) != 1:
        return None
    given = source_of(store, site.product, operand)
    if given is None or given.op != "load" or given.args[1] != store.index:
        return None
    if given.args[2] not in _FLOATS or program.buffers[given.args[0]].spec.dtype != given.args[2]:
        return None
    return replace(operand, buffer=given.args[0], dtype=given.args[2])


def _cast_from(store: Store, product: Product, operand: Operand) -> Expr | None:
    """The operand of a cast."""
    return store.expr.args[0] if store.expr.op == "round_to" else None


def _padded_from(store: Store, product: Product, operand: Operand) -> Expr | None:
    """The tensor in front of zero padding that the product does not read: the zeros are behind the last of
    its
    columns.
    """
    if store.expr.op != "masked" or operand is not product.b or operand.offset or operand.stride[0]:
        return None
    test, given, _ = store.expr.args
    if test.op != "lt" or test.args[0].op != "index" or test.args[1].op != "const":
        return None
    column, step = test.args[0].args[0], operand.stride[2]
    inside = (store.index - column * step).bounds  # of a column
    is_column = operand.stride[1] == 1 and inside[0] >= 0 and inside[1] < step
    return given if is_column and test.args[1].args[0] >= product.size[2] else None


def template_step(program: Program, site: Site, tiling: Tiling) -> TritonStep:
    """The one launch that does the work of a site's steps."""
    product = site.product
    draft = draft_in_parts(product, tiling) if product.in_parts else None
    function = emit_product(product, tiling) if draft is None else settle(draft)
    old = program.steps[site.consumer] if site.consumer is not None else None
    names = tuple(product.buffers())
    scratch = (f"scratch_{product.out.buffer}",) if function.scratch else ()
    writes = (
        *([product.out.buffer] if product.stored else []),
        *(old.writes if isinstance(old, TritonStep) else ()),
        *scratch,
    )
    operands = {o.buffer for o in product.operands()}
    inplace = old.inplace if isinstance(old, TritonStep) else ()
    inplace = tuple((w, r) for w, r in inplace if r not in product.outs and r not in operands)
    loaded = {e.args[0] for s in product.epilogue for e in loads_of(s.expr)} - product.outs.keys()
    reads = tuple(name for name in names if name in operands | loaded)
    note = site.label()
    return TritonStep(
        None,
        (*names, *scratch),
        reads,
        writes,
        inplace,
        product.numbers,
        note,
        function=function,
        in_parts=draft,
    )


def _with_scratch(buffers: dict[str, Buffer], steps: Iterable[Step]) -> dict[str, Buffer]:
    """The buffers, and the memory that these steps need for themselves: as any other intermediate it belongs
    to one call.
    """
    found = dict(buffers)
    for step in steps:
        function = step.function if isinstance(step, TritonStep) else None
        if function is not None and function.scratch:
            name, nbytes = step.args[-1], function.scratch * function.grid + _SCRATCH_SLACK
            device = buffers[step.args[0]].spec.device
            found[name] = Buffer(name, TensorSpec.dense((nbytes,), torch.uint8, device), "temp")
    return found


def put(program: Program, chosen: Iterable[tuple[Site, Tiling]]) -> Program:
    """The program with templates at the chosen sites, each where the last of its steps stood."""
    new: dict[int, Step] = {}
    gone: set[int] = set()
    for site, tiling in chosen:
        if site.at in gone:  # beside another one
            continue
        if gone.union(new).intersection(site.steps()):  # two products that one kernel reads: the first's
            if not site.product.in_parts:
                continue
            site = site.variants()[-1]  # no library computes parts
        taken = set(site.steps())
        gone |= taken
        new[site.steps()[-1]] = template_step(program, site, tiling)
    counters["templates"]["gemm"] += len(new)
    steps = [new.get(n, step) for n, step in enumerate(program.steps) if n in new or n not in gone]
    buffers = _with_scratch(program.buffers, new.values())
    return Program(program.name, program.inputs, buffers, steps, program.outputs, program.mutations)


def trial(program: Program, site: Site, steps: list[Step]) -> Program:
    """A program of these steps alone (the site's own, or the template): their inputs are given, what they
    leave is returned.
    """
    needed, made = _needs_and_makes([program.steps[n] for n in site.steps()])
    flow, inside = _Flow(program), set(site.steps())
    left = sorted(n for n in made if n in flow.results or not inside.issuperset(flow.readers.get(n, ())))
    known = _with_scratch(program.buffers, steps)
    buffers = {n: replace(known[n], kind="input", value=None) for n in needed}
    touched = made.union(*(touches(step) for step in steps)) - needed
    buffers |= {n: replace(known[n], kind="output" if n in left else "temp") for n in sorted(touched)}
    outputs = tuple(BufRef.whole(buffers[n]) for n in left if n not in needed)
    return Program(
        f"{program.name}_trial",
        tuple(sorted(needed)),
        buffers,
        list(steps),
        outputs,
        tuple(sorted(made & needed)),
    )


def _needs_and_makes(steps: Iterable[Step]) -> tuple[set[str], set[str]]:
    """Buffers that the steps read before one of them writes them, and those that they write."""
    needed: set[str] = set()
    made: set[str] = set()
    for step in steps:
        needed |= reads_of(step) - made
        made.update(writes_of(step))
    return needed, made
