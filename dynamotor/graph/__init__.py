"""What all rooms share of graphs: specs, shape propagation, symbolic sizes, passes, facts of ops, graphs as
text.

## Contract 1: specs and shape propagation (`graph/`)

* `graph.spec.TensorSpec(shape, stride, dtype, device, offset)`: frozen, hashable. In every graph of ours
  `node.meta["val"]` is a `TensorSpec`, a tuple of (`TensorSpec` | None | number) for multi-output ops, or a
  Python number/bool for scalar results.
* `graph.shape_tensor.ShapeTensor`: a wrapper tensor subclass without data. `ShapeTensor.make(spec,
  requires_grad=False)`. Ops on it run through `graph.shapes.infer_spec(func, args, kwargs)`: the op's
  definition (`graph/ops/<family>.py`), and a memo over PyTorch's meta kernels for the rest.
  PyTorch's own autograd, autocast and composite decompositions run above it in C++. Data-dependent results
  raise `graph.shape_tensor.DataDependent`.
* `graph.shape_tensor.recording(recorder)`: context manager; while on, each op that reaches the dispatch level
  calls `recorder.record(func, args, kwargs) -> result` instead of plain shape inference; factories
  (`torch.zeros`) are caught too (a dispatch mode).
* Users: capture runs each torch call once on ShapeTensors to know shapes/dtypes/aliasing; autograd records
  the aten graph with a recorder.

## Contract 8: sizes that differ between calls (`graph/sizes.py`, `graph/sym_int.py`)

* A `Size` is an integer expression over `Symbol`s and stands wherever an int of a shape, stride, offset or
  argument may stand: in `TensorSpec`, in index expressions, in a program's buffers. Programs whose sizes are
  fixed hold plain ints and pay nothing. A constant is never a `Size`.
* All symbols of one program belong to one `ShapeEnv`. A comparison of `Size`s is answered where it is
  provable for all values (`lo <= symbol <= hi`; 0 and 1 are programs of their own, so lo is 2), else as it is
  at the call that is being compiled, and becomes a guard of the program. `int(size)`, `range(size)` and the
  like specialise in the same way: code that knows nothing of symbols stays right.
* A compiler's own choices ask nothing: `hint(size)` for costs and orders that are right for every value;
  `known(">=", a - b)`, `divides(n, size)`, `Size.same` where a form is right only if something holds (else
  take the form that is always right, e.g. with a tail). A guard from lowering or codegen is a missed variant:
  it is shown by `explain`, and the models of the list must not have any.
* PyTorch's C++ sees `to_torch(size)`, a `torch.SymInt`; `from_torch` is the way back. `ShapeTensor.make` and
  `infer_spec` do both.
* Graphs (contracts 2 and 3): a placeholder whose `meta["val"]` is a `Size` (a bare symbol) takes an int at
  each call; sizes computed from it are nodes (`operator.add`, `mul`, `floordiv`, `mod`, `torch.sym_min`,
  `torch.sym_max`) with a `Size` in `meta["val"]`, so every graph runs in eager with plain ints.
  `gm.meta["shape_env"]` is the `ShapeEnv`, absent where all sizes are fixed. Symbols that only arguments'
  sizes define are placeholders too: the caller (the dispatcher) computes them once, beside the guards.
* Guards of an entry are complete when its backend has returned; whoever compiles later (a backward at its
  first call) checks its own before it runs.
* An unbacked symbol (`u0`; `ShapeEnv.unbacked`, made by a `sizes_from_data` rule while `shape_mode` has a
  `DataSizes`) is a size that is known only when a node of the graph has run: the first node whose `val` is
  the bare symbol gives it. `lo` is 0 for a count, -infinity for an integer that a tensor held; 0 and 1 are
  among its values. Its hint answers nothing: a question that is not provable for all values raises
  `ShapeEnv.undecided(question)` (DM210; in a capture the break with its line), it never becomes a guard.
  `ShapeEnv.tell` notes a node's checks (`torch._check`) or a kernel demands (`n >= 0`).
* Capture, shape rules and PyTorch's C++ (`sym_int.py`) meet unbacked symbols. Lowering, codegen and the
  guards never do: autograd cuts the graph at the nodes that make them (contract 3).
* Text: `repr(size)` is an expression of Python and of C alike, over the symbols' names and the functions
  `floordiv`, `mod`, `min`, `max`.
"""
