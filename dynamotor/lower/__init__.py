"""From aten graphs to programs of fused loop kernels and aten calls.

## Contract 4: the program (lower → codegen)

`lower.lower_graph(aten_gm, info) -> Program` (in `lower/program.py`): a list of steps over named buffers.
* `Buffer(name, spec, kind)`, kind in input/temp/output/const. `BufRef(name, shape, stride, offset)`: a
  strided view of a buffer.
* `LoopStep(kernel, reads, writes)`: one fused loop kernel (`lower.ir.Kernel`), turned into one C function by
  `codegen/cpp.py`.
* `ExternStep(target, args, kwargs, outs, out_variant)`: an aten call; tensors in args are BufRefs. `outs`
  names the buffers it makes; with `out_variant` it writes them through `out=` into planned memory, otherwise
  it allocates them itself.
* Sizes that differ between calls: shapes, strides and offsets hold `Size`s, a placeholder that is a symbol is
  an input with the symbol's name, and `LoopStep.symbols` names a kernel's number arguments behind its
  pointers. Loops run to these, vectors have tails unless the width provably divides; what depends on work
  (threads, parts of sums, rows' scratch) is decided at the call. `runtime.memory.plan_slots` gives a buffer
  memory that provably is large enough; offsets are computed once for new sizes, and the views of memory of
  the last sizes are kept.
* `outputs`: BufRef | number | None each. `mutations`: writes into input buffers (from the trailing `copy_`),
  placed after all reads.
* Checks between the stages: `lower/verify_program.py` (nodes, kernels, programs; DM913) and
  `codegen/verify_emitted.py` (a kernel's text against its IR; DM914); cheap checks are always on,
  `config.verify` does all of it, and the checks of kernels that `bench.verification` registers. A fault of a
  stage is planted in `tests/faults/`, one decorated function each.
"""
