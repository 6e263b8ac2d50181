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

The sections are in the order in which a call uses the files: it reads values from outside, traces the program, adds an
entry that serves later calls, and handles graph breaks. The last two sections describe sizes and numbers that are not
known while tracing.

### Reading

* A `Source` (`source.py`) says where a value comes from; it can be fetched again at each call.
* `Reader` (`reader.py`) is the only way in for an object from outside, since it installs the guards of each read:
  `Reader.wrap(source, obj)` gives the value, with the guards of its kind; `Reader.attribute` reads attributes that C
  code computes (a slot, a getset, a type with a lookup of its own); `Reader.ask` is for any other question.
* `Trace.real` runs a function on the objects behind values, which are known while tracing: its exception becomes the
  program's, and settings that decide the result (`sys.set_int_max_str_digits`, `np.seterr`) are guarded there.
* `tests/capture/test_reads.py` reads the source: a function of `capture/` that looks at an outside object in another
  way must be listed there with the reason.
* Facts of tensors and PyTorch's settings are rows of `torch_rules.py` (`METADATA`, `ANSWERS`, `QUERIES`), each under
  what keeps the answer true. A fact without a row breaks the graph.
* `guards.py` has the kinds of guards. Each has a Python evaluator, for reasons and tests, and an encoding for the C
  program (`csrc/guards.c`).

### Tracing

* A `Trace` (`trace.py`) is one symbolic run. It is composed of `stack` (inlined frames, places, the cut), `sizes`,
  `graph`, `reader`, `effects`, `checks`, `checkpoint_reads`, `late_code`, and the tables of `trace_tables.py`
  (`tensors`, `numbers`, `modules`, `objects`, `calls`). Its own methods are CPython's object protocol (`protocol.py`)
  and the calls from one value to another.
* Facts of one call are on its `Invocation` and `Attempt` (`attempts.py`).
* `interpreter.py` and `ops_*.py` are the symbolic interpreter, with one `@opcode` function each; `values/` has the
  kinds of values.
* The result is a `Captured`: the graph, its inputs (`Source`s), the guards, and the Python that follows the graph
  (results, effects, what runs after a break).

### Entries

* `_C.Dispatcher` (`dispatch.py`, `csrc/dispatch.c`) is a vectorcall object. It checks the guards, gathers the graph's
  inputs, calls the compiled graph and rebuilds the results. On a miss it calls Python (`frontend.py`), which captures,
  adds an entry and runs it (`may_add` decides whether another one; `miss_reason` and `first_failure` of `dispatch.py`
  say why none fits, and `recompiles.py` reports it). Entries belong to the dispatcher, never to the code object.

### Graph breaks

* `breaks.py`: reasons, codes and cures; rules raise `unsupported(...)`. `cut.py`: places where a graph may end.
  `Compiler._broken` (`frontend.py`) decides how the call continues, and `note_break` reports it.
* `resume.py`: the breaking instruction runs in a copy of the user's frame. Resume functions go on from there; their
  code is the user's code object with a prefix, and each has a dispatcher of its own.
* `inner_frames.py`, `csrc/frame_hook.c`: while the instruction runs, the PEP 523 hook sends each user function entered
  there to a dispatcher of its own. Outside of that no hook is installed.

### Sizes and floats that change from call to call

* A size, stride or integer from outside that differs at a later call (`SizePolicy.learn`, at each miss) becomes a
  symbol at the recompile (`symbolic_inputs.py`, `values/size.py`, `csrc/sizes.c`). `TraceSizes` makes the symbols of a
  trace; `SizeOf`, `StrideOf` and the integers' own sources say where their values are read.
* A `SizeValue` is a `Constant` whose `value` specialises, so code that knows nothing of symbols stays right. If the
  program needs a symbol as a number, the trace is made again with that number from the start.
* `TensorMatch` leaves symbolic sizes and strides to one `SizesHold` row an entry, made when the backend has returned:
  ranges, what shares or follows from a symbol, and all assumptions, as postfix code over 64-bit integers.
* Entries with symbols are `general` and tried after the others. Only backends that take symbols get them
  (`backends.takes_symbols`).
* A float that differs at a later call is a `FloatValue` (`values/number.py`), which specialises in the same way. Where
  a tensor meets it in a sum, product, quotient or comparison, it is an input of the graph: a 64-bit tensor without
  dimensions, on the CPU, made by a `Called` source. Python computes further floats from it at each call; a comparison
  of it is an `Answer` row.

### Sizes and numbers that only data decides

* A call whose result's size data decides (`nonzero`, `t[mask]`, `unique`, `repeat_interleave`, `item()` of integers;
  the `sizes_from_data` rules of `graph/ops/`) is a node with `meta["data_dependent"]`. `size` calls for the unbacked
  symbols that it makes follow it.
* These symbols are `SizeValue`s like others: arithmetic and use as a size stay in the graph, and results read them from
  the graph's outputs. A question that nothing proves breaks the graph at its line; a comparison first gives a
  `ConditionValue`, which `torch._check` takes.
* A float or bool of a tensor is a `HeldNumber`: it is handed on by way of an output, and looking at it breaks the graph.
  Sums, differences and products of held floats are held, too.
* Where sizes stay numbers (`dynamic=False`, a backend that takes no symbols), the call itself breaks the graph. Only
  `item()` does not: its number is held.
"""
