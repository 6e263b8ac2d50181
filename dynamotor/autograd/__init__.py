"""From a torch graph to functional aten graphs: forward and backward, joined to PyTorch's autograd at run
time.

## Contract 3: the aten graph (autograd → compiler)

`autograd.aot.aot_compile(gm, example_inputs, compile_graph, *, static_inputs) -> callable(*tensors)`, where
`compile_graph(aten_gm, info: GraphInfo) -> callable(*tensors) -> tuple`.
* `GraphInfo(kind="inference"|"forward"|"backward", static_inputs: frozenset[int], name: str, n_saved: int,
  ...)`, in `graph/spec.py`.
* Nodes: `placeholder`, `call_function` with `OpOverload` targets (or `operator.getitem` on multi-output ops),
  `output`. Functional, with one exception: trailing `aten.copy_.default(placeholder, value)` nodes, one per
  mutated input, right before `output` (in-place buffers such as batch-norm statistics). No aliasing
  surprises: outputs that alias inputs or each other are rebuilt outside by the run-time wrapper.
* Forward: outputs are the user outputs, then the saved values. Backward: inputs are the saved values, then
  tangents; outputs are gradients for each differentiable input (None allowed). A compiled backward may have a
  second way to be called, `boxed(list)`, which empties the list and frees each input after its last use, as
  eager's backward frees its saved values (`retain_graph=True` keeps all).
* Randomness: with `config.fallback_random` the aten random ops stay, in eager's order. Otherwise each draws
  `torch.ops.dynamotor.rand(seed, stream, size, dtype=, device=) -> uniform [0,1)` where `seed` is the result
  of one `torch.ops.dynamotor.new_seed() -> int64[1]` per forward graph (drawn from torch's default generator,
  so `manual_seed` repeats it) and `stream` is a constant per call site. `rand` is a pure function of (seed,
  stream, element index): Philox4x32-10, counter = (linear index // 4, 0, stream, 0), key = (seed low, seed
  high), lane = linear index % 4, value = (bits >> 8) * 2^-24. Eager and C++ versions are bit-equal. The
  partitioner recomputes it in the backward from the saved seed. The other prims live beside them in
  `graph/prims.py`.
* A graph with an op that cannot be recorded or differentiated is cut around it (`autograd/graph_split.py`
  says where, `stages.StagedCall` runs the parts); "fallback" events say so (`what="op"`), and `explain` shows
  them.
* A graph with `data_dependent` nodes or state calls (contract 2) is cut around them in the same way, which is
  no fallback: they run in eager PyTorch, the parts between them are compiled. Symbols pass borders as ints,
  each part
  computes its sizes from them. A part of a graph with symbols is a `variants.Variants`: compiled at its first
  run in a `ShapeEnv` of its own, where every symbol, unbacked ones too, has a value (0 and 1 are programs of
  their own), and again only for sizes that its own guards refuse.
* In autograd's graph a compiled graph is one node, or several (`autograd/autograd_nodes.py`): an output leads
  to a non-leaf input only where eager's graph does.
* `keeper=` (`autograd/program_cache.py`): programs are kept on disk between capture and autograd. The key is
  the torch graph's exact text, the inputs' metadata, PyTorch's settings and the backend's `environment()`
  (`codegen/stored.py`: settings, versions, a hash of this package's files, the machine). An entry is JSON:
  the `Recipe` (the run-time wrapper's facts of a program), the call program's `Listing` with its constants
  and its libraries' keys, and each backward's graph; a compiled backward is an entry of its own.
  `graph/plain_data.py` writes values down; what has no exact text raises `NotPlain` and is not kept (event
  "not kept"). With `config.verify`, `check`, `sanitize`, `log`, `debug` or a listener of a compilation's
  events, nothing is taken from there.
* Inputs and outputs of wrapper subclasses (`WrapperSpec`) are taken apart (`desugar.py`): the aten graphs
  know their inner tensors alone.
* Gradients' strides and dtypes are eager's. Output strides are eager's (recorded in `meta["val"]`); inner
  strides are the compiler's to choose.
"""
