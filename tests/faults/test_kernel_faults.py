"""Faults of lowering, scheduling and the emitters of kernels."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from planted import Faults

from dynamotor.codegen import cpp_body, cpp_kernel, triton_body, triton_kernel, triton_plan
from dynamotor.lower import lower_graph, ops_index, ops_view, outputs
from dynamotor.lower.index_expr import Index, Loaded, Var
from dynamotor.lower.ir import Kernel, Phase, Reduce, Scratch, Store, load, make, rewrite
from dynamotor.lower.program import LoopStep
from dynamotor.lower.schedule import over_loops

faults = Faults()
A, B, SQUARE = torch.randn(6, 40), torch.randn(40), torch.randn(8, 8)


def scaled(a, b):
    return a * b + 1


def softmax(a, b):
    return torch.softmax(a.mul(b).exp().tanh() * 2, -1)


def sums(a, b):
    return (a * b).sum(0), (a * b).sum(1)


def two_sums_and_a_map(a, b):
    return (a * b).sum(1), b / (a * b).sum()


def transposed(a):
    return a.t() + torch.arange(8.0), a * 2


def padded(a):
    return torch.nn.functional.pad(a, (1, 0)) + 1


def picked(a, rows):
    return a[rows] * 2


def read_backwards(a, b):
    return (a * b).view(3, 64).flip(0).cumsum(0)


def flipped_in_place(a):
    total = a.sum()
    a.copy_(a.flip(0).tanh())
    return total


def overwritten_late(a):
    product = torch.mm(a, a)
    a.copy_(torch.ones(8, 8))
    return product


def with_a_product(a):
    return torch.mm(a[2:6] * 2, a.tanh())


# -- how faults are planted ----------------------------------------------------------------------------------
def kernels(plant, change):
    """Every scheduled kernel is changed."""
    real = lower_graph.build_kernel
    plant.setattr(lower_graph, "build_kernel", lambda group, stored: change(real(group, stored)))


def statements(change):
    """A change of kernels: each statement becomes those that `change` gives (None: it stays)."""

    def edit(kernel: Kernel) -> Kernel:
        def each(given):
            found = [(s, change(s)) for s in given]
            return tuple(x for s, new in found for x in ((s,) if new is None else new))

        phases = tuple(Phase(each(p.inner), each(p.row)) for p in kernel.phases)
        return replace(kernel, phases=phases, final=each(kernel.final), final_once=each(kernel.final_once))

    return edit


def stores(change):
    return statements(lambda s: change(s) if isinstance(s, Store) else None)


def indices(change):
    """A change of kernels: the index of each load becomes another."""

    def swap(e):
        return load(e.args[0], change(e.args[1]), e.args[2]) if e.op == "load" else None

    return statements(lambda s: (replace(s, expr=rewrite(s.expr, swap)),))


def steps_swapped(index: Index) -> Index:
    steps = list(index.terms.values())
    return Index(dict(zip(index.terms, reversed(steps), strict=True)), index.const)


def programs(plant, change):
    """The steps of a program are changed before they are checked."""
    real = lower_graph._steps
    plant.setattr(lower_graph, "_steps", lambda *args: change(real(*args)))


def emitted(plant, change):
    """The text of every C++ function is changed."""
    real = cpp_kernel.RowsEmitter.function
    plant.setattr(cpp_kernel.RowsEmitter, "function", lambda self, name: change(real(self, name)))


# -- scheduling ----------------------------------------------------------------------------------------------
@faults.add("DM913", sums, A, B)
def a_store_is_dropped(plant):
    kernels(plant, stores(lambda s: ()))


@faults.add("DM913", scaled, A, B)
def a_store_is_repeated(plant):
    kernels(plant, stores(lambda s: (s, s)))


@faults.add("DM913", scaled, A, B)
def a_store_is_shifted(plant):
    kernels(plant, stores(lambda s: (replace(s, index=s.index + 1),)))


@faults.add("DM913", transposed, SQUARE)
def two_strides_of_a_store_are_swapped(plant):
    kernels(plant, stores(lambda s: (replace(s, index=steps_swapped(s.index)),)))


@faults.add("DM913", transposed, SQUARE)
def two_strides_of_a_load_are_swapped(plant):
    kernels(plant, indices(steps_swapped))


@faults.add("DM913", scaled, A, B)
def a_load_is_shifted(plant):
    kernels(plant, indices(lambda index: index + 1))


@faults.add("DM913", lambda a, b: a - b, SQUARE, SQUARE + 1)
def two_operands_are_swapped(plant):
    def swap(e):
        return make("sub", e.args[::-1], e.dtype) if e.op == "sub" else None

    kernels(plant, statements(lambda s: (replace(s, expr=rewrite(s.expr, swap)),)))


@faults.add("DM913", scaled, A, B)
def a_result_has_another_dtype(plant):
    kernels(plant, stores(lambda s: (replace(s, memory=torch.int32),)))


@faults.add("DM913", softmax, A, B)
def a_row_is_stored_once_a_row(plant):
    def once(kernel):
        last = kernel.phases[-1]
        return replace(kernel, phases=(*kernel.phases[:-1], Phase((), (*last.row, *last.inner))))

    kernels(plant, once)


@faults.add("DM913", sums, A, B)
def a_row_sum_is_stored_for_each_element(plant):
    kernels(plant, lambda k: replace(k, phases=tuple(Phase((*p.inner, *p.row)) for p in k.phases)))


@faults.add("DM913", softmax, A, B)
def a_phase_is_omitted(plant):
    kernels(plant, lambda k: replace(k, phases=k.phases[1:]))


@faults.add("DM913", softmax, A, B)
def two_phases_are_one(plant):
    def join(k):
        return replace(
            k,
            phases=(
                Phase(tuple(s for p in k.phases for s in p.inner), tuple(s for p in k.phases for s in p.row)),
            ),
        )

    kernels(plant, join)


@faults.add("DM913", softmax, A, B)
def a_value_is_not_kept(plant):
    kernels(plant, statements(lambda s: () if isinstance(s, Scratch) else None))


@faults.add("DM913", softmax, A, B)
def a_sum_is_a_maximum(plant):
    kernels(plant, statements(lambda s: (replace(s, kind="max"),) if isinstance(s, Reduce) else None))


@faults.add("DM913", scaled, A, B)
def a_loop_is_too_long(plant):
    def longer(k):
        last = k.inner[-1]
        more = Var(last.name, last.size + 8)
        return over_loops(k, {last: Index.of(more)}, inner=(*k.inner[:-1], more))

    kernels(plant, longer)


@faults.add("DM913", scaled, A, B)
def a_loop_is_too_short(plant):
    def shorter(k):
        last = k.inner[-1]
        fewer = Var(last.name, last.size - 1)
        return over_loops(k, {last: Index.of(fewer)}, inner=(*k.inner[:-1], fewer))

    kernels(plant, shorter)


# -- lowering ------------------------------------------------------------------------------------------------
@faults.add("DM913", padded, A)
def a_padded_read_is_not_masked(plant):
    plant.setattr(ops_view, "masked", lambda condition, body, other: body)


@faults.add("DM913", picked, A, torch.tensor([1, 0, 3]))
def a_position_is_not_checked(plant):
    plant.setattr(ops_index, "loaded_index", lambda e, size, wrap=True: Index.of(Loaded(e, size)))


@faults.add("DM913", flipped_in_place, SQUARE)
def an_input_is_overwritten_before_it_is_read(plant):
    plant.setattr(outputs, "_reads_elsewhere", lambda *args: False)


@faults.add("DM913", lambda a: torch.mm((a * 2).tanh().flip(0), a), SQUARE)
def a_result_takes_memory_that_is_still_read(plant):
    def pairs(kernel, sizes):
        return tuple((a[0], b[0]) for a in kernel.params if a[2] for b in kernel.params if not b[2])

    plant.setattr(lower_graph, "in_place_pairs", pairs)


@faults.add("DM913", overwritten_late, SQUARE)
def an_input_is_overwritten_first(plant):
    real = lower_graph.fuse
    plant.setattr(lower_graph, "fuse", lambda *args: (lambda items: [items[-1], *items[:-1]])(real(*args)))


@faults.add("DM913", with_a_product, SQUARE)
def steps_run_in_another_order(plant):
    programs(plant, lambda steps: steps[::-1])


@faults.add("DM913", with_a_product, SQUARE)
def a_step_is_dropped(plant):
    programs(plant, lambda steps: [s for s in steps if not isinstance(s, LoopStep)])


@faults.add("DM913", with_a_product, SQUARE)
def an_aten_call_reads_behind_the_end_of_a_buffer(plant):
    def beyond(step):
        return (
            step
            if isinstance(step, LoopStep)
            else replace(step, args=tuple(replace(ref, offset=4) for ref in step.args))
        )

    programs(plant, lambda steps: list(map(beyond, steps)))


@faults.add("DM913", with_a_product, SQUARE)
def a_steps_buffers_are_swapped(plant):
    def swap(step):
        return replace(step, args=step.args[::-1]) if isinstance(step, LoopStep) else step

    programs(plant, lambda steps: list(map(swap, steps)))


# -- C++ -----------------------------------------------------------------------------------------------------
@faults.add("DM914", two_sums_and_a_map, A, B)
def final_stores_are_not_emitted(plant):
    plant.setattr(cpp_kernel.RowsEmitter, "_finish", lambda self, *args: "")


@faults.add("DM914", scaled, A, B)
def a_store_leaves_no_text(plant):
    emitted(plant, lambda text: re.sub(r"st<float>\(p\d+\+[^;]*;", "", text))


@faults.add("DM914", scaled, A, B)
def a_store_stands_behind_its_loop(plant):
    emitted(plant, lambda text: re.sub(r"(st<float>\(p\d+\+[^;]*;)\}", r"}\1", text))


@faults.add("DM914", scaled, A[:, :21].contiguous(), B[:21].contiguous())
def the_rest_of_a_vector_loop_is_missing(plant):
    emitted(plant, lambda text: re.sub(r"for\(;n0<21;n0\+\+\)\{[^}]*\}", "", text))


@faults.add("DM913", read_backwards, torch.randn(64, 3), torch.randn(64, 1))
def what_is_negative_is_divided(plant):
    def split(self, n):
        whole = {a: c for a, c in self.terms.items() if c % n == 0}
        rest = {a: c for a, c in self.terms.items() if c % n}
        return Index({a: c // n for a, c in whole.items()}, self.const // n), Index(rest, self.const % n)

    plant.setattr(Index, "_split", split)


@faults.add("DM914", scaled, A, B)
def an_emitted_store_is_shifted(plant):
    emitted(plant, lambda text: re.sub(r"(st<float>\(p\d+\+)", r"\g<1>1+", text))


@faults.add("DM914", scaled, A, B)
def an_emitted_store_is_repeated(plant):
    emitted(plant, lambda text: re.sub(r"(st<float>\(p\d+\+[^;]*;)", r"\1\1", text))


@faults.add("DM914", lambda a: a.softmax(-1), torch.randn(3, 4, 5, 16).permute(0, 2, 1, 3))
def rows_are_decoded_with_other_strides(plant):
    emitted(plant, lambda text: re.sub(r"%(\d+);", r"%2;", text))


@faults.add("DM914", sums, torch.randn(4096, 40), B)
def chunks_of_rows_overlap(plant):
    emitted(plant, lambda text: text.replace("last=(chunk+1)*", "last=1+(chunk+1)*"))


@faults.add("DM914", scaled, A, B)
def an_index_forgets_its_constant_or_first_term(plant):
    real = cpp_body.CppBody.index

    def index(self, i, scope):
        return real(self, Index(dict(list(i.terms.items())[1:]), i.const) if len(i.terms) > 1 else i, scope)

    plant.setattr(cpp_body.CppBody, "index", index)


# -- Triton --------------------------------------------------------------------------------------------------
@faults.add("DM914", scaled, A, B, target="triton")
def a_triton_store_has_no_mask(plant):
    plant.setattr(
        triton_body.TileBody, "mask", lambda self, scope, axes, inside="": ("", triton_body.NOTHING)
    )


@faults.add("DM914", sums, A, B, target="triton")
def a_triton_store_leaves_no_text(plant):
    real = triton_kernel.TileEmitter.draft
    text = r"\n *tl\.store\([^\n]*"
    plant.setattr(
        triton_kernel.TileEmitter,
        "draft",
        lambda s: (f := real(s)) and replace(f, source=re.sub(text, "", f.source)),
    )


@faults.add("DM914", scaled, A, B, target="triton")
def a_triton_kernel_stores_to_an_operand(plant):
    def store(self, s, scope, known):
        self.pointers = dict.fromkeys(self.pointers, "p0")
        real(self, s, scope, known)

    real = triton_body.TileBody.store
    plant.setattr(triton_body.TileBody, "store", store)


@faults.add("DM913", two_sums_and_a_map, A, B, target="triton")
def launches_for_final_statements_are_missing(plant):
    plant.setattr(triton_plan.Planner, "maps_of", lambda *args: [])
    plant.setattr(triton_plan.Planner, "finish", lambda *args: [])


@faults.add("DM913", sums, A, B, target="triton")
def partial_sums_are_added_up_before_they_are_there(plant):
    real = triton_plan.plan_kernel
    plant.setattr("dynamotor.codegen.triton.plan_kernel", lambda *given: real(*given)[::-1])


test_each_fault_is_found = faults.test()
