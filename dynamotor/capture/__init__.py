"""From a call of user code to a torch graph, its guards, its side effects and what follows a break.

## Contract 2: the torch graph (capture → backend)

`torch.fx.GraphModule` with
* placeholders for every tensor that comes from outside (arguments, parameters, buffers, global or constant
  tensors), no `get_attr`, no `call_module`;
* `call_function` nodes of public torch/operator functions and `call_method` nodes of tensor methods;
  `operator.getitem` for tuples; `torch._C._set_grad_enabled(bool)` and
  `torch.amp.autocast_mode._enter_autocast(...)/_exit_autocast(node)` for regions; in-place ops stay; calls of
  `graph/states.py` that set inference mode or the state of random numbers, for backends that take them;
* `output` node: a flat tuple of nodes; `gm.meta["static_inputs"]`: frozenset of placeholder indices bound to
  parameters/buffers (the same tensor object at each call until a guard fails); `node.meta["val"]` on all
  nodes; `node.meta["where"]`: `UserLine`. A tensor of a wrapper subclass is one placeholder or node, whose
  `val` is a `WrapperSpec`; `Rewrap` makes one of its inner tensors, `getattr(node, name)` gives an inner tensor.
* A backend is `(gm, example_inputs: list[Tensor]) -> callable(*tensors) -> tuple|list of tensors`. The inputs
  are real tensors with right `requires_grad`. The callable mutates its inputs as eager does.
* `gm.meta["on_backward"]`, when there: `(backward aten graph) -> (compiled backward -> callable)`.
  `aot_compile` takes it out and calls it once it has a backward graph, which it may rewrite; the graph that it returns
  wraps the compiled backward. It stays in `gm.meta` when a backend does not differentiate ahead of time: that
  is how the data-parallel room knows.

## Contract 5: capture inside (`capture/`)

* `source.py`: `Source` objects say where a value comes from and can be fetched again. `Reader.wrap(source,
  obj) -> value` (`reader.py`) is the only way in for an object from outside; it installs the guards of the
  read: `wrap` with the rows of the value's kind, `Reader.attribute` for what C code answers (a slot, a getset, a type with
  a lookup of its own), `Reader.ask` for any other question. `tests/capture/test_reads.py` reads the source: a
  function of `capture/` that looks at an outside object without one of them must be listed there with the
  reason. Facts of tensors and PyTorch's settings are rows of `torch_rules.py` (`METADATA`, `ANSWERS`,
  `QUERIES`), each under what keeps the answer true; what has no row breaks the graph. `guards.py`: guard
  rows, each with a Python evaluator (for reasons and tests) and an encoding for the C program
  (`csrc/guards.c`).
* `trace.py`: a `Trace` is one symbolic run, composed of parts: `stack` (inlined frames, places, the cut), `sizes`,
  `graph`, `reader`, `effects`, `checks`, `checkpoint_reads`, `late_code`, and the tables of `trace_tables.py` (`tensors`, `numbers`,
  `modules`, `objects`, `calls`). Its own methods are CPython's object protocol (`protocol.py`) and the calls from one
  value to another. Facts of one call are on its `Invocation` and `Attempt` (`attempts.py`).
* `interpreter.py` + `ops_*.py`: the symbolic interpreter, one `@opcode` function each. `values/`: the value kinds.
* A capture gives `Captured(gm, inputs: list[Source], guards, outputs plan, effects, break plan | None)`.
* `dispatch.py` + `csrc/dispatch.c`: `_C.Dispatcher`, a vectorcall object: guards → gather → compiled callable
  → rebuild outputs; on a miss it calls Python (`capture.frontend`), which captures, adds an entry and runs
  it. Entries belong to the dispatcher, never to the code object.
* `symbolic_inputs.py` + `values/size.py` + `csrc/sizes.c`: a size, stride or integer from outside that differs at a
  later call (`SizePolicy.learn`, at each miss) becomes a symbol at the recompile. `TraceSizes` makes the
  symbols of one trace (`SizeOf`, `StrideOf` and the integers' own sources say where their values are read); a
  `SizeValue` is a `Constant` whose `value` specialises, so what knows nothing of symbols stays right. A trace
  of which the program needed a number is done again with that number from the start. `TensorMatch` leaves
  symbolic sizes and strides (None) to one `SizesHold` row an entry, made when the backend has returned:
  ranges, what shares or follows from a symbol, and all assumptions, as postfix code over 64-bit integers.
  Entries with symbols are `general` and tried after the others. Only backends that take symbols get them
  (`backends.takes_symbols`).
* `values/number.py`: a float that differs at a later call is a `FloatValue`, which specialises in the same way.
  Where a tensor meets it in a sum, product, quotient or comparison it is an input of the graph (a tensor of 64
  bits without dimensions, on the CPU, made by a `Called` source); values computed from it are computed by
  Python at each call, and a comparison of it is an `Answer` row.
* A call whose result's size data decides (`nonzero`, `t[mask]`, `unique`, `repeat_interleave`, `item()` of
  integers, ...; `sizes_from_data` rules of `graph/ops/`) is a node with `meta["data_dependent"]`, followed by `size` calls for
  the unbacked symbols that it makes. They are `SizeValue`s like others: arithmetic and use as a size stay in
  the graph, a question that nothing proves breaks it at its line (a comparison first gives a
  `ConditionValue`, which `torch._check` takes), results read them from the graph's outputs. A float or bool
  of a tensor is a `HeldNumber`: handed on by way of an output, and who looks at it breaks the graph; sums,
  differences and products of floats are held too. Where sizes stay numbers
  (`dynamic=False`, a backend that takes no symbols) the call itself breaks, but for `item()`, whose number is held.
* `inner_frames.py` + `csrc/frame_hook.c`: while a break runs the user's instruction natively, the PEP 523
  hook sends each user function entered there to a dispatcher of its own. Outside of that no hook is
  installed.
* `resume.py`: a graph break runs the breaking instruction in a copy of the user's frame and goes on in resume
  functions, whose code is the user's code object with a prefix; each resume function has a dispatcher of its
  own.
"""
