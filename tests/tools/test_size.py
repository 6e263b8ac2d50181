"""No room grows unseen: statements by room, as `python -m bench size` prints them. A limit is raised by who
says why.
"""

from __future__ import annotations

import pytest

from bench import size

LIMITS = {
    ".": 696,  # modules of nodes and the check mode for backends of others (19), classes (3); export apart from packages (1); calls that torchdynamo's tests make (18); callables that a higher room compiles (4); a GPU's workers are started early (3); torch.compile leaves our code and jax's alone (3); sizes of torch.compile's graphs, and of graphs for its backends (60); backend="auto" (185)
    "autograd": 3_357,  # gradients of outputs by what lies behind (50); many gradients at once (17), the gradient of one output by another (60); leaves made inside, second backwards where nothing was saved, hooks of outputs that are gone (34); ops of users that write stay in the graph (65); operands of products that a whole step computes again (29); tensors of inference mode (4); the form of an op without its out, for the device and whole steps (12); a GPU's workers are started early (2); shapes changed in place behind views, views of memory with holes (16); inputs that share memory around parts, kept inputs that were written (19); a class of a closure (10); the line of a part that raised (6); views older than a write (15); saved tensors that come back otherwise (35), gradients without memory (13); versions of results that were written (15); the check mode before the aten graph (82); programs on disk with symbols (79); second derivatives: 165; writes into flat memory; views that come several at once; zeros without memory; parts of graphs with symbols (180)
    "base": 620,  # whether the user froze objects is asked once (1); what is left to eager is counted and told in one call (4); refusals in one statement, the checkout beside the package (8); settings that tests set instead of patching constants (4); what a pause of the collector has made is old from the start (13); settings for what compiles later (7); whose mistake an error is (9); lines as tracebacks (9); the line of the user's program, for the rooms that ask for it (17); words for annotations (4)
    "capture": 11_915,  # numbers held by tensors in full, method caches of what is asked (30); the device of a region (14); copies of tuples that are the tuples themselves (16); calls that give the list that they were given (4); a float and a size that both change (1); reentrant checkpoints of what has no gradient, sizes that become None (4); NumPy's rows, moves, fills and types (62); numbers of NumPy's that differ (18); what special methods must give, what C takes of subclasses of int, float and str (39); scripted functions (17); regions cut around (14); modules and classes that are disabled, compiled methods (19); allowed autograd functions, names and sorts (18); lazy bits of tensors that a trace makes (2); tensors that guards do not keep alive (13), functions that hold themselves (25), deques, index with bounds, fromkeys and class methods over properties (27), modes set and back (13), C functions compared, the switch of __torch_function__ asked, exceptions among their arguments (27); hooks and gradients of what was calculated on the way, names that a module's class sets, what autograd saved (42); decoding by a table of opcodes (9); random states, inference mode and lazy modules in graphs, equal modules, loops that break (see docs\/decisions.md); item of tensors handed on, outside iterators, constant results (161); what such ops say that they write (10); dicts that CPython reads raw, lengths that lists ask for, arguments of containers (37); views and iterators over objects made inside, read-only dicts that leave (45); calls whose value nobody takes (9); operators, copies and messages of subclasses of containers (40); parameters and modules made or copied inside (90); tensors of sizes and of numbers of data (30); the exception that a caller handles (14); tracebacks that hold frames (13); empty tables of hooks without values, fields of dataclasses without frames (35); tracebacks that were taken off, sys.exception (9); numbers of enums and subclasses (20); objects let go (25); iterators over dicts and sets that change (65); arguments that iterators refuse (15) and writes that eager may refuse (30); contents of subclasses of int and str, operators of odd pairs (55); iterators as eager has them (70); the line of an error behind a write (40); deques 80; tensors that the trace knows 60; functions that transforms and control flow are given: 250; hooks, settings, weak references: 70; __torch_function__: 190; annotations (12); what made a number of a size that changed, checks with errors of their own (18); tests of data that only raise (150); NumPy arrays (410); modules that are where they are brought to (40); hooks on what comes from outside (15); buffers that their reader sets (7)
    "codegen": 6_325,  # positions of flex_attention that need no check, values before its loops (79); kernels that differ in numbers share a function (76); batch norms by their statistics in the check mode (6); code of long texts on disk (12); the package's hash by the state of its files (8); tiles for windows (16); instruction sets that the processor lacks (4); saved values as eager lays them out (4); a planner with its tuning (20); whole numbers without -0 (2); long sums in strips (60); flex_attention (590); GPU programs on disk (70); small maps in one launch (170); variants of GPU kernels for sizes (230)
    "distributed": 1_086,  # a graph that cannot be tried is counted (3); copies of graphs that write no code (1); buckets reduced and waited for in whole steps (52)
    "graph": 4_481,  # strides of unknown rows (20); lists that an op writes (2); grids of changing sizes (11); no warning of a variance of one element (2); an op whose name is a keyword (12); the same (3); nodes of states (see capture); walks over graphs of autograd, tools and xla (21); ops that tell strides apart (9), eager's strides of saved values (3); out= of another size (4); shapes of what most programs do without meta kernels that import sympy (190), ops of a GPU with sizes (8); the number of a storage (5); padding to buckets (810); lines of graphs that raise (32), kernels that need not be asked (6); copies of expanded tensors (11); what is lazy (3); picks where nothing is (9); bounds of integers that change between calls (24), parts that are written, dimensions out of range (13); layouts of rolls (9), embedding bags (4); sizes as plain data (29); guards that are settled, unfold and choices with symbols (17); what a loop and the guards know of sizes, shapes of xla (25); control flow and flex_attention (200); interpolation with symbols; bodies of functions; sizes that data decides (120); transforms of Fourier (14), views that a layout forbids (11); padding to buckets (1,094: moves along padded dimensions 180, gradients of convolutions and statistics 104); bags with a last offset (5)
    "lower": 4_897,  # batch norms in two for whole steps (5); fusion's rules are an argument (3); eager's strides for ops that tell them apart (24); halves of a whole step are not fused (6); what a reduction begins with, for both targets (10); the builder apart from walk, realisation and outputs (45), enums (15); annotations of locals are statements too; 60 write contents of inputs in place
    "runtime": 1_161,  # Triton's pool by the processors of the process (1); processors that this process may use (3); gathers that GCC gets wrong (11); recordings let plain calls' memory go (4); huge pages that are slow to come (10); workers are forked by one process (25); C++ laid out for readers (30)
    "step": 1_537,  # counts and divisions of optimizers (11); batch norms computed again from their statistics (17); calls of the update alone that ask in C (55); the update alone (105); values computed again in the backward (50), state apart from gradients (15); the phases of a trace are a class (17); steps of DDP modules (56), optimizers around others, with counts of their own (8)
    "tools": 1_650,  # export as a graph, with its signature and as torch.export's (182); packages as steps that C++ runs (294); packages
    "xla": 9_333,  # lists of tensors that an op writes (3); shapes changed in place behind views (16); 750 are names that programs for torch_xla import, ctc_loss and sizes 70
}


def test_every_room_has_a_limit() -> None:
    assert sorted(size.rooms()) == sorted(LIMITS)


@pytest.mark.parametrize("room", LIMITS)
def test_a_room_keeps_to_its_limit(room: str) -> None:
    assert size.rooms()[room] <= LIMITS[room]


def test_the_package_keeps_to_its_limit() -> None:
    assert (
        sum(size.rooms().values()) <= 47_058
    )  # the aim is 34,000; packages are 250, for C++ 294, functions in graphs 1,000, GPU sizes 230, sizes of data 400, hooks and backends of others 160, backend="auto" 210, __torch_function__ 190, second derivatives 165


def test_statements_are_counted_and_not_their_lines() -> None:
    assert size.statements('"""Text."""\nif a:\n    b = (\n        1,\n    )\nelse:\n    c()\n') == 4


def test_every_file_is_there_for_something() -> None:
    assert sum(size.mechanisms().values()) == sum(size.rooms().values())
