"""The path of a miss: trace the call, hand the graph to the backend, add the entry, run it.

>>> dispatcher = make_dispatcher(fn, options, lambda gm, inputs: gm.forward)
>>> dispatcher(x)
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import _C
from ..base import compat, failures
from ..base.collector import collector_paused
from ..base.config import CompileOptions, config
from ..base.errors import (
    BackendError,
    CaptureError,
    DynamotorError,
    EagerWarning,
    InternalError,
    RecompileWarning,
)
from ..base.events import Event, collect, compile_id, counters, emit, log, timed, warn_once
from ..base.probe import COMPILE, lost, require
from ..base.recursion import deep_recursion
from ..graph.modes import left_when_raising, preserved_modes
from ..graph.shape_tensor import unseen_by_hooks
from ..graph.sizes import Guard as Assumption
from . import (
    failed_graphs,
    ops_control,
    ops_stack,
    recompiles,
    rules_attention,
    rules_autograd,
    rules_builtins,
    rules_containers,
    rules_contextvars,
    rules_control_flow,
    rules_copy,
    rules_dtensor,
    rules_frames,
    rules_function_modes,
    rules_gradients,
    rules_library,
    rules_number_options,
    rules_numpy,
    rules_overrides,
    rules_parameters,
    rules_random,
    rules_states,
    rules_threads,
    rules_transforms,
    rules_wrappers,
    siblings,
    torch_rules,
)
from .attempts import (
    Attempt,
    Break,
    Captured,
    Done,
    Invocation,
    Numbers,
    Outcome,
    Retry,
    finished,
    parameter_names,
    root_value,
)
from .breaks import BreakReason, Stop, Unsupported, too_deep
from .checks import CheckFailed, checked
from .compiled_share import Share, without_counting
from .cut import ResumePoint, emit_break, stands_before
from .dispatch import arg_sources, make_entry, miss_reason
from .guards import Ambient, AnyGuard, TensorIs, first_failure
from .host_code import are_plain, stays_on_host
from .inner_frames import InnerFrames
from .lazy_modules import Afresh
from .result_emitter import ResultEmitter
from .resume import unwind
from .source import Arg, Source
from .stance import may_compile, said_by, stance
from .symbolic_inputs import FloatIs, SizePolicy, TraceSizes
from .trace import Trace
from .undo import JOINED, undone
from .values import context, deque, instances, klass, late_numbers, nn_module, tensor, torch_function
from .values.base import Raised, Value, functions_without_rule

# Importing these registers their opcodes, call rules and value kinds.
REGISTERED = (
    ops_control,
    ops_stack,
    rules_attention,
    rules_autograd,
    rules_builtins,
    rules_containers,
    rules_contextvars,
    rules_control_flow,
    rules_copy,
    rules_dtensor,
    rules_frames,
    rules_gradients,
    rules_library,
    rules_number_options,
    rules_numpy,
    rules_function_modes,
    rules_overrides,
    rules_parameters,
    rules_random,
    rules_states,
    rules_threads,
    rules_transforms,
    rules_wrappers,
    torch_rules,
    context,
    deque,
    instances,
    klass,
    late_numbers,
    nn_module,
    tensor,
    torch_function,
)


# One thread captures and compiles at a time: captures change PyTorch's modes and settings of the process.
_compiling = threading.RLock()


def _in_child() -> None:
    """After a fork: whoever held the lock is not in the child, nor are the threads of the parent's OpenMP
    pool, for which a parallel kernel would wait for ever: such a child computes on one thread, as
    DataLoader's workers do."""
    global _compiling
    _compiling = threading.RLock()
    if counters["capture"]["graphs"] and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_in_child)
_PLAIN_MODES = (None, "max-autotune-no-cudagraphs")  # others replay graphs, into which all inputs are copied
_ON_HOST = "the rest of a function behind a graph break computes on the host alone"
MORE_SHAPES = 8  # times as many guard sets may be kept where the user expects shapes to change (dynamic=True)
# A loop over a length that differs is unrolled: a graph of more torch calls is long, and fewer programs are kept of it.
LONG, LENGTHS_OF_LIMIT = 1000, 8  # one in so many of `cache_size_limit`
Backend = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]


class Compiler(siblings.Sibling):
    """Compiles the calls of one callable; the `miss` callback of its dispatcher."""

    is_root = True

    def __init__(
        self, fn: Callable[..., Any], options: CompileOptions, backend: Backend, policy: SizePolicy
    ) -> None:
        super().__init__(fn, policy)
        self.options, self.backend = options, backend
        self.resumes: dict[Any, Any] = {}
        # Weakly: objects in a cycle, and the model with it, would wait for the collector.
        me = weakref.ref(self)
        self.inner = InnerFrames(lambda function: _inner_dispatcher(function, me()))
        self.share = Share("", lambda: () if (alive := me()) is None else alive.all_entries())
        self.told_full = False
        owner = getattr(fn, "__self__", None)
        module = isinstance(owner, torch.nn.Module)
        self.model = weakref.ref(owner) if module else None
        self.breaks_for_all = False  # a program with the module as an argument was tried, and broke
        self.name = type(owner).__qualname__ if module else getattr(fn, "__qualname__", type(fn).__name__)
        self.share.name = self.title = self.name
        self.compilations = recompiles.Compilations()
        self.why_eager = ""  # once it runs eager as a whole

    def dispatcher(self) -> Any:
        """The callable that replaces the original."""
        made = _C.Dispatcher(self.miss, self.fn, self.name, self.raised)
        self.own_dispatcher = weakref.ref(made)
        made.disabled = not self.strict and bool(lost(COMPILE))
        return made

    def all_entries(self) -> Iterator[Any]:
        """The compiled entries, with those of functions resumed after breaks and functions entered in breaks."""
        yield from self.entries()
        for each in (*self.resumes.values(), *self.inner.dispatchers()):
            yield from each.entries

    @property
    def strict(self) -> bool:
        """Whether a graph break is an error."""
        return self.options.fullgraph or bool(self.options.options.get("strict", config.strict))

    @recompiles.one_report
    def miss(self, dispatcher: _C.Dispatcher, args: tuple[Any, ...], kwnames: tuple[str, ...]) -> Any:
        """No entry fits this call: compile it, or run it as it is."""
        n_positional = len(args) - len(kwnames)
        uncounted = without_counting(
            lambda: dispatcher(*args[:n_positional], **dict(zip(kwnames, args[n_positional:])))
        )
        if uncounted is not NotImplemented:
            return uncounted
        if context.foreign_modes():  # a user's mode wants to see the ops that eager runs
            counters["frames"]["mode"] += 1
            return self.eager(args, kwnames)
        if not may_compile(self.name, lambda: self.why_none_fits(dispatcher, args, kwnames)):
            return self.eager(args, kwnames)
        begin = time.perf_counter()
        call = Invocation(args, kwnames, handling=sys.exception() is not None)
        with _compiling:
            found = self.entry_for(dispatcher, call)
        if found is None:
            run = self.share.natively(self.why_eager, None, self.fn)
            return self.share.ends_calls(functools.partial(run, self.eager))(args, kwnames)
        entry, tensors = found
        failed = None
        try:
            with collect(
                "fallback"
            ) as events:  # the parts of a graph that is cut are compiled when it first runs
                outs = entry.run(*tensors)
        except Exception as error:  # errors from here on have no context
            failed = error
        if failed is None:
            entry.info.data.eager += eager_texts(events)
            entry.info.data.missed += 1
            self.share.measure(entry, tensors, time.perf_counter() - begin)
            try:
                return entry.finish(outs, args)
            finally:
                self.share.ran(entry.info.data)
        try:
            return self.raised(entry, failed, args, kwnames)
        finally:
            failed = None

    def entry_for(self, dispatcher: _C.Dispatcher, call: Invocation) -> Any:
        """An entry for the call and the tensors that it takes, compiled now or by another thread meanwhile;
        None: run it eager.
        """
        found = self.served(dispatcher, call)
        if found is not None:
            return found
        found = siblings.shared(self, call)
        if found is not None:
            dispatcher.add(found[0])
            return found
        if dispatcher.entries and not self.may_add(dispatcher, call):
            return None
        if not dispatcher.entries:
            siblings.learn(self, call)
        try:
            entry = self.new_entry(call)
            tensors = entry.program.check(call.args)
            if tensors is None:  # the first compilation of a process imports modules, which change others
                entry = self.new_entry(call)
                tensors = entry.program.check(call.args)
            if tensors is None:
                raise InternalError(
                    "DM901",
                    f"a guard of {self.name} fails right after its capture",
                    why=miss_reason(entry, self.flat(call.args), call.n_positional, call.kwnames),
                    cure="report this; dynamotor.disable(fn) keeps the function out",
                )
        except InternalError as error:
            failures.note(self.fn, None if call.kwnames else call.args, error)
            self.failed(dispatcher, error)
            return None
        dispatcher.add(entry)
        self.shelf.add(self, entry)
        return entry, tensors

    def new_entry(self, call: Invocation) -> Any:
        """Capture and compile a call."""
        with collector_paused(), unseen_by_hooks(), self.compilations.next():
            captured, run = self.compiled(call, not self.breaks_for_all and siblings.is_for_all(self))
            CaptureError.when(
                captured.left_to_eager and self.strict,
                "DM255",
                f"the graph of {self.name} would run op by op in eager PyTorch",
                why=(captured.left_to_eager or [""])[0],
                cure="remove the named part from the function, or accept it (fullgraph=False, strict=False)",
            )
            captured.examples.clear()  # the entry lives on, the first call's tensors need not
            entry = self.entry(captured, run, call)
            return siblings.bind(entry, self.owner, len(call.args)) if captured.for_all else entry

    def compiled(self, call: Invocation, for_all: bool) -> tuple[Captured, Callable[..., Any]]:
        """A call's trace and its compiled graph. Sizes stay numbers where symbols stop the compiler, or leave
        a graph to eager PyTorch that is compiled with numbers."""
        call.symbols, general = False, None
        try:
            general = self.compiled_once(call, for_all)
        except (BackendError, InternalError) as error:
            if not call.symbols or config.verify and isinstance(error, InternalError):
                raise
            why = str(error).splitlines()[0]
        else:
            if not call.symbols or not general[0].left_to_eager:
                return general
            why = general[0].left_to_eager[0]
        if self.policy.guessed:
            self.policy.guessed = None
            return self.compiled(call, for_all)
        self.policy.refused = why
        special = self.compiled_once(call, for_all)
        if general is not None and special[0].left_to_eager:  # then symbols are not in the way
            self.policy.refused = ""
            return general
        counters["capture"]["sizes kept numbers"] += 1
        log("recompiles", lambda: f"{self.name}: sizes stay numbers: {why}")
        return special

    def compiled_once(self, call: Invocation, for_all: bool) -> tuple[Captured, Callable[..., Any]]:
        """A call's trace and its compiled graph."""
        captured = self.capture(Attempt(call, self.policy, for_all=for_all and not self.breaks_for_all))
        captured.settings = config.snapshot()
        fallbacks = counters["fallback"].copy()
        with collect("fallback", "auto", "late") as events:
            run = _nothing if captured.gm is None else self.backend(captured.gm, captured.examples)
        captured.fallbacks, captured.eager = counters["fallback"] - fallbacks, eager_texts(events)
        captured.events = events
        captured.left_to_eager = [str(e.data["reason"]) for e in events if e.data.get("what") == "graph"]
        return captured, run

    def served(self, dispatcher: _C.Dispatcher, call: Invocation) -> tuple[Any, Any] | None:
        """The entry that is there for such a call, and the tensors that it takes."""
        for entry in dispatcher.entries:
            if call.fits(entry):
                tensors = entry.program.check(call.args)
                if tensors is not None:
                    return entry, tensors
        return None

    def warm_up_own(self, *args: Any, **kwargs: Any) -> list[str]:
        """`compiled.warm_up(...)`: the attribute holds no dispatcher, which holds it."""
        dispatcher = self.own_dispatcher()
        return [] if dispatcher is None else self.warm_up(dispatcher, *args, **kwargs)

    def warm_up(self, dispatcher: _C.Dispatcher, *args: Any, **kwargs: Any) -> list[str]:
        """Capture and build for such a call, its backward too, and run nothing of it; gives what a call will
        still have to build, and why.
        """
        if stance() == "force_eager":
            return [f"{self.name} runs in eager PyTorch, since {said_by()} says force_eager"]
        call = Invocation((*args, *kwargs.values()), tuple(kwargs))
        with _compiling:
            found = self.entry_for(dispatcher, call)
        if found is None:
            return [f"{self.name} runs in eager PyTorch"]
        captured = found[0].info.data
        with collect("late") as late:
            for event in itertools.chain(
                captured.events, late
            ):  # a built part may have something left itself
                event.data.get("build", _nothing)()
        left = [*captured.left_to_eager, *(e.data["waits"] for e in captured.events if "waits" in e.data)]
        return [*left, f"what follows {captured.reason}"] if captured.reason else left

    def raised(
        self, entry: _C.Entry, error: Exception, args: tuple[Any, ...], kwnames: tuple[str, ...]
    ) -> Any:
        """The graph of an entry raised (an index out of range): the call runs eager from its start, where all
        that came before the error happens and the error shows the user's own line. Where the graph may have
        had an effect already the error gets that line, and not where saved-tensor hooks count what runs (they
        raise to end a checkpoint's recomputation)."""
        hooked = compat.top_saved_hooks(True) is not None
        if isinstance(error, CheckFailed):
            counters["frames"]["check failed"] += 1
            return self.eager(args, kwnames)
        if isinstance(error, InternalError):
            failures.note(entry.info.data.gm, entry.program.check(args), error)
        if hooked or isinstance(error, DynamotorError | MemoryError | torch.OutOfMemoryError):
            self.unwind(args)
            raise error
        gm = entry.info.data.gm
        once = entry.info.data.undone is None or any(map(failed_graphs.sends, gm.graph.nodes))
        if error.__dict__.pop(JOINED, False) or once:
            data, tensors = entry.info.data, entry.program.check(args)
            error = failed_graphs.as_eager_raises(data.gm, tensors, error, data.draws)
            self.unwind(args)
            try:
                raise error
            finally:
                del error  # whose traceback holds this frame
        counters["frames"]["graph raised"] += 1
        result = self.eager(args, kwnames)
        self.note_raised(error)
        return result

    def note_raised(self, error: Exception) -> None:
        """Say that the graph raised and eager did not: else each call would run twice, and nothing would show
        it.
        """
        reason = f"the compiled graph raised {type(error).__name__}: {error}"
        emit("fallback", what="function", name=self.name, reason=reason, code="DM412")
        warn_once(
            f"raised-{self.share.number}",
            f"[DM412] {reason}; eager PyTorch did not\n  such calls of {self.name} run in eager PyTorch",
            EagerWarning,
        )

    def unwind(self, args: tuple[Any, ...]) -> None:
        """Leave the blocks of the user's frame that are open where the captured part begins: none here."""

    def entry(self, captured: Captured, run: Callable[..., Any], call: Invocation) -> Any:
        """The entry of a trace whose graph is compiled, so that all is known that was assumed of its
        sizes.
        """
        row = captured.sizes.row()
        guards = captured.guards if row is None else [*captured.guards, row]
        if type(self) is Compiler and captured.reason is not None:
            captured.finish = self.share.ends_calls(captured.finish)
        captured.begin = getattr(run, "begin", None)
        run = undone(checked(run, captured.check, captured.draws), captured.undone or ())
        run = left_when_raising(run, captured.gm)
        entry = make_entry(
            guards, captured.inputs, run, captured.finish, call.n_positional, call.kwnames, captured
        )
        rounds = captured.reason is not None and captured.reason.kind == "loop"  # any round
        entry.general = row is not None or rounds
        captured.sizes.close()
        return entry

    def why_none_fits(
        self, dispatcher: _C.Dispatcher, args: tuple[Any, ...], kwnames: tuple[str, ...]
    ) -> str:
        """Why no entry serves a call; "" where there is none."""
        flat, n = self.flat(args), len(args) - len(kwnames)
        reasons = [miss_reason(e, flat, n, kwnames) for e in dispatcher.entries]
        return recompiles.by_reason(reasons, [e.info.data.compile_id for e in dispatcher.entries])

    def may_add(self, dispatcher: _C.Dispatcher, call: Invocation) -> bool:
        """Tell why no entry fits; false when there are as many as may be."""
        most = config.cache_size_limit * (MORE_SHAPES if self.options.dynamic else 1)
        full = len(dispatcher.entries) >= most
        if full and self.told_full:  # looking for reasons takes long, and this may be every call from now on
            counters["frames"]["cache_limit"] += 1
            self.refuse_more()
            return False
        flat = self.flat(call.args)
        reasons, lengths = [], 0
        for e in dispatcher.entries:
            number = e.info.data.sizes.why_number(first_failure(e.info.guards, flat), flat)
            reasons.append(miss_reason(e, flat, call.n_positional, call.kwnames) + number)
            lengths += bool(number) and e.info.data.ops > LONG
        full = full or lengths > config.cache_size_limit // LENGTHS_OF_LIMIT
        for e in dispatcher.entries:
            if call.fits(e):
                self.policy.learn(e.info.guards, flat)
                many = 2 * len(dispatcher.entries) >= most
                if many or self.takes_any_module(call.args) or any(map(_is_gone, e.info.guards)):
                    self.policy.unbind(e.info.guards, flat)
        counters["frames"]["recompiled"] += 1
        new = "" if full else self.compilations.upcoming()
        recompiles.report(self.name, self.title, dispatcher.entries, reasons, new)
        if full:
            self.told_full = True
            self.why_eager = (
                f"{self.name} was compiled {len(dispatcher.entries)} times, the last time since {reasons[0]}"
            )
            self.share.begin_again()
            counters["frames"]["cache_limit"] += 1
            self.refuse_more()
            why = recompiles.why_many(dispatcher.entries, self.policy, self.options.dynamic)
            warn_once(
                f"cache-limit-{self.share.number}",
                f"{self.name} was compiled {len(dispatcher.entries)} times; further variants run in eager PyTorch. "
                f"The last recompile: {reasons[0]}. {why}"
                "If so many variants are intended, raise dynamotor.config.cache_size_limit",
                RecompileWarning,
            )
        return not full

    def refuse_more(self) -> None:
        """An error where eager PyTorch may not run the variants beyond the limit."""
        CaptureError.when(
            self.strict,
            "DM256",
            f"{self.name} would run in eager PyTorch: it has as many variants as cache_size_limit allows",
            why=self.why_eager,
            cure="pass what changes as a tensor, mark changing sizes with dynamotor.mark_dynamic, raise "
            "dynamotor.config.cache_size_limit, or accept it (fullgraph=False, strict=False)",
        )

    def takes_any_module(self, args: tuple[Any, ...]) -> bool:
        """Whether modules that come as arguments have one program, as soon as a second one has come: where
        gradients are recorded, but by DDP's reducer."""
        reducing = any(isinstance(arg, torch.nn.parallel.DistributedDataParallel) for arg in args)
        return torch.is_grad_enabled() and self.options.mode in _PLAIN_MODES and not reducing

    def meets_modules_of(self, parent: Compiler) -> None:
        """This compiles a part of what another one compiles, which may be called for each of its modules."""
        self.model = parent.model
        if self.options.mode in _PLAIN_MODES:
            self.policy.is_repeated = self._is_repeated

    def _is_repeated(self, cls: type) -> bool:
        model = None if self.model is None else self.model()
        return model is not None and sum(type(module) is cls for module in model.modules()) > 1

    def forget(self) -> None:
        """Drop entries for functions resumed after breaks and for functions entered in
        breaks.
        """
        self.resumes.clear()
        self.policy = replace(self.policy.again(), is_repeated=self.policy.is_repeated)
        self.inner.forget()
        self.told_full = False

    def failed(self, dispatcher: _C.Dispatcher, error: InternalError) -> None:
        """A mistake of the compiler's own: eager from now on, with a warning (strict, or where graphs are
        verified: an error).
        """
        if self.strict or config.verify:
            raise error
        counters["frames"]["failed"] += 1
        emit("fallback", what="function", name=self.name, reason=str(error), code=error.code)
        self.why_eager = str(error).splitlines()[0]
        warn_once(
            f"internal-{self.share.number}", f"{error}\n  {self.name} runs in eager PyTorch", EagerWarning
        )
        dispatcher.disabled = True

    def eager(self, args: tuple[Any, ...], kwnames: tuple[str, ...]) -> Any:
        """Run the original."""
        n = len(args) - len(kwnames)
        return self.fn(*args[:n], **dict(zip(kwnames, args[n:])))

    # Capture ------------------------------------------------------------------------------------------------
    def capture(self, attempt: Attempt) -> Captured:
        """Trace a call until an attempt is a program. Raises CaptureError where that is all that may be done,
        InternalError for mistakes of our own.
        """
        require(COMPILE)
        try:
            with timed("capture"), deep_recursion():
                captured = self._traced(attempt)
        except DynamotorError:
            raise
        except Exception as error:
            raise InternalError(
                "DM900",
                f"capture of {self.name} failed: {type(error).__name__}: {error}",
                cure="report this; dynamotor.disable(fn) keeps the function out",
            ) from error
        finally:
            functions_without_rule.clear()
        counters["frames"]["captured"] += 1
        counters["capture"]["graphs"] += captured.gm is not None
        captured.compile_id = compile_id.get()
        emit("capture", name=self.name, graph=captured.gm, guards=captured.guards, captured=captured)
        return captured

    def _traced(self, attempt: Attempt) -> Captured:
        while True:
            outcome = self._tried(attempt)
            if isinstance(outcome, Break):
                outcome = self._broken(outcome, attempt)
            if isinstance(outcome, Done):
                outcome.captured.for_all = attempt.for_all
                return outcome.captured
            attempt = outcome.attempt

    def _tried(self, attempt: Attempt) -> Outcome:
        """Make one trace."""
        ambient, trace = Ambient.current(), attempt.trace()
        try:
            with preserved_modes():
                try:
                    result = self._run(trace, attempt)
                except Unsupported as stop:
                    if not stands_before(stop, trace) or self.strict:
                        raise
                    return self._again(stop, trace, attempt) or self._break_here(stop, trace, ambient)
                trace.stack.check_generators()
                if not trace.checks.stand():
                    return self._without_checks(attempt)
                if trace.checkpoint_reads.rewritten():
                    return self._without_checkpoints(attempt)
                if trace.calls.modes:
                    return self._without_modes(attempt)
                captured = finished(trace, ambient, lambda emitter: emitter.emit(result))
            return attempt.needing(trace.sizes.specialised()) or Done(captured)
        except Raised as raised:
            raised.__traceback__ = None
            if trace.checks.any:  # where one fails the program may not come here
                return self._without_checks(attempt)
            again = attempt.needing(trace.sizes.specialised())
            if again is None and attempt.for_all:
                again = self._for_one(attempt)
            return again or Done(self._raises(raised, trace, ambient, attempt.call.kwnames))
        except Afresh:
            return Retry(attempt)
        except Unsupported as stop:
            return self._again(stop, trace, attempt) or Break.of(stop, trace, ambient)
        except RecursionError:  # also Python 3.12's and 3.13's of calls from C, whose limit nothing raises
            return Break.of(too_deep("calls are deeper than Python lets capture follow"), trace, ambient)
        finally:
            attempt.call.symbols |= bool(trace.sizes.env.symbols)
            trace.forget()

    def _again(self, stop: Unsupported, trace: Trace, attempt: Attempt) -> Retry | None:
        """The attempt that may get further than one that broke."""
        numbers = trace.sizes.specialised() or self._needed_as_numbers(stop, trace.sizes, attempt)
        again = attempt.needing(numbers)
        if again is not None:
            return again
        if not trace.checks.stand():
            return self._without_checks(attempt)
        if trace.checkpoint_reads.rewritten():
            return self._without_checkpoints(attempt)
        if trace.calls.modes:
            return self._without_modes(attempt)
        if rules_states.broken_region(trace):
            self.policy.broken_regions = True
            log("breaks", f"{self.name}: captured again, since a region has {stop.reason}")
            return Retry(attempt)
        if attempt.for_all and isinstance(self.owner, torch.nn.Module):
            return self._for_one(attempt)
        return None

    def _without_checks(self, attempt: Attempt) -> Retry:
        """The program's tests of data break the graph: it writes its inputs, say, and so does not run
        twice."""
        self.policy.checks = False
        return Retry(attempt)

    def _without_checkpoints(self, attempt: Attempt) -> Retry:
        """A checkpointed function reads a tensor that is written later: its recomputation finds the new contents, so
        the graph breaks there."""
        self.policy.checkpoints = False
        return Retry(attempt)

    def _without_modes(self, attempt: Attempt) -> Retry:
        """The graph breaks inside of a region of a function mode, or it stays open: it begins outside of graphs."""
        self.policy.function_modes = False
        return Retry(attempt)

    def _for_one(self, attempt: Attempt) -> Retry:
        """What follows a break is not shared, and of a held module more can be said: it has programs of its
        own."""
        self.breaks_for_all = True
        return Retry(replace(attempt, for_all=False))

    def _needed_as_numbers(self, stop: Unsupported, sizes: TraceSizes, attempt: Attempt) -> Numbers:
        """All symbols and floats that are inputs, if the trace gets further without them: PyTorch's own
        Python code may know nothing of symbols.
        """
        numbers: dict[Source, Assumption | FloatIs] = {**sizes.floats_as_numbers(stop.reason.where)}
        if stop.reason.kind == "unsupported-op":
            numbers |= sizes.as_numbers(stop.reason.where)
        if not numbers:
            return {}
        trial = replace(attempt, fixed={**sizes.fixed, **numbers})
        trace = trial.trace()
        try:
            with preserved_modes():
                self._run(trace, trial)
        except Unsupported as again:
            same = (again.reason.what, again.reason.where) == (stop.reason.what, stop.reason.where)
            return {} if same else numbers
        except (Raised, Afresh, RecursionError):
            pass
        finally:
            trace.forget()
        return numbers

    def _raises(self, raised: Raised, trace: Trace, ambient: Ambient, kwnames: tuple[str, ...]) -> Captured:
        """The program raises, as far as the capture can tell: eager raises it, with the user's own
        traceback.
        """
        what = f"{self.name}: the capture saw {raised.value.describe()} raised, which eager did not raise"
        reason = BreakReason(
            "raised", what, cure="report this; the function runs eager", stack=tuple(raised.stack)
        )

        def finish(outs: Any, args: tuple[Any, ...]) -> Any:
            result = self.eager(args, kwnames)
            if self.strict:
                raise reason.error()
            if not told:
                told.append(reason)
                note_break(reason)
                warn_once(f"raised-{self.share.number}", str(reason), EagerWarning)
            return result

        counters["frames"]["raised"] += 1
        told: list[BreakReason] = []
        return Captured(None, [], [], [ambient, *trace.reader.guards], finish, trace.sizes, "", reason)

    def _break_here(self, stop: Unsupported, trace: Trace, ambient: Ambient) -> Break:
        """The break of a trace that did nothing of the breaking instruction: it is cut as it stands."""
        broken = Break.of(stop, trace, ambient)
        if not broken.cuts or broken.cuts[0] != (len(stop.frames), trace.stack.steps):
            return broken
        trace.stack.stop_before(stop.frames)
        captured = self._cut(trace, ambient, self._inside(stop, len(stop.frames)), stop.reason)
        return replace(broken, cuts=broken.cuts[1:], captured=captured)

    def _broken(self, broken: Break, attempt: Attempt) -> Done | Retry:
        """Capture up to the break, or nothing when no frame can be cut."""
        stop, failed = broken.stop, broken.sizes
        note_break(stop.reason)
        if self.strict:
            raise stop.reason.error()
        if broken.captured is not None:
            return Done(broken.captured)
        for depth, step in broken.cuts:
            captured, further = self._up_to(replace(attempt, fixed=failed.fixed, break_at=step), depth, stop)
            if captured is not None:
                return Done(captured)
            if not further:
                break
        if attempt.for_all:
            return self._for_one(replace(attempt, fixed=failed.fixed))
        counters["frames"]["eager"] += 1
        self.inner.skip(self.fn)
        by_itself = "transform", "frames", "" if stop.frames else "disabled"
        captures_calls = stop.reason.kind not in by_itself and not stop.uncaptured_calls
        hooked = self.inner if captures_calls else None
        run = functools.partial(self.share.natively(stop.reason, hooked, self.fn), self.eager)
        kwnames = attempt.call.kwnames
        finish = lambda outs, args: run(args, kwnames)  # noqa: E731
        return Done(Captured(None, [], [], broken.guards, finish, failed, "", stop.reason))

    def _up_to(self, attempt: Attempt, depth: int, stop: Unsupported) -> tuple[Captured | None, bool]:
        """The program up to an instruction, with so many frames cut; or None, and whether another place may
        do."""
        ambient, trace = Ambient.current(), attempt.trace()
        try:
            with preserved_modes():
                try:
                    self._run(trace, attempt)
                except Stop:
                    if len(trace.stack.stopped) != depth:
                        return None, False
                    return self._cut(trace, ambient, self._inside(stop, depth), stop.reason), True
        except (Unsupported, Raised, RecursionError):
            pass
        finally:
            trace.forget()
        return None, False

    def _inside(self, stop: Unsupported, depth: int) -> InnerFrames | None:
        """What captures functions that the breaking instruction enters; None where it is a call that does so
        itself."""
        alone = "transform", "disabled" if depth == len(stop.frames) else ""
        return None if stop.reason.kind in alone else self.inner

    def _cut(
        self, trace: Trace, ambient: Ambient, inner: InnerFrames | None, reason: BreakReason
    ) -> Captured | None:
        """The program of a trace that has come to its cut; None where its frames cannot be rebuilt."""

        def going_on(emitter: ResultEmitter) -> str:
            natively = self.share.natively(reason, inner)
            return emit_break(trace, emitter, self.resume_dispatcher, natively, self.is_root)

        try:
            trace.stack.check_generators()
            return finished(trace, ambient, going_on, reason)
        except Unsupported:
            return None

    def resume_dispatcher(self, point: ResumePoint) -> Any:
        """The dispatcher of a place in the middle of a function, one for each place."""
        found = self.resumes.get(point.key)
        if found is None:
            found = self.resumes[point.key] = ResumeCompiler(point, self).dispatcher()
        return found

    def _run(self, trace: Trace, attempt: Attempt) -> Value:
        args, kwnames = attempt.call.args, attempt.call.kwnames
        owner = Arg(len(args), "self") if attempt.for_all else None
        root, bound = root_value(trace, self.fn, owner)
        n = len(args) - len(kwnames)
        sources = arg_sources(parameter_names(self.fn), n, kwnames)
        values = [trace.wrap(source, arg) for source, arg in zip(sources, args)]
        trace.tail = True
        return root.call(trace, [*bound, *values[:n]], dict(zip(kwnames, values[n:])))


class ResumeCompiler(Compiler):
    """Compiles the rest of a function after a graph break; its calls have the frame's flat values as
    arguments.
    """

    is_root = False

    def __init__(self, point: ResumePoint, parent: Compiler) -> None:
        super().__init__(point.native(), parent.options, parent.backend, parent.policy.again())
        self.point, self.share = point, parent.share
        self.title = f"{parent.title}, resumed at line {point.at.instr.line},"
        self.resumes, self.inner = parent.resumes, parent.inner
        self.meets_modules_of(parent)

    @functools.cached_property
    def stays_on_host(self) -> bool:
        """Whether the rest reaches no tensor by its names."""
        return stays_on_host(self.point.at.code, self.point.globals)

    @recompiles.one_report
    def miss(self, dispatcher: _C.Dispatcher, args: tuple[Any, ...], kwnames: tuple[str, ...]) -> Any:
        """No entry fits: capture the rest, but run it natively where it computes on the host alone."""
        if dispatcher.entries or not self.stays_on_host or not are_plain(args):
            return super().miss(dispatcher, args, kwnames)
        counters["frames"]["on the host"] += 1
        return self.share.natively(_ON_HOST, self.inner)(self.eager, args, kwnames)

    def _run(self, trace: Trace, attempt: Attempt) -> Value:
        return self.point.run(trace, attempt.call.args)

    def unwind(self, args: tuple[Any, ...]) -> None:
        unwind(self.point.at, args, self.point.globals)


class InnerCompiler(Compiler):
    """Compiles a function entered during a graph break; its calls have the bound parameters as arguments, by
    position.
    """

    def __init__(self, fn: types.FunctionType, parent: Compiler) -> None:
        super().__init__(fn, parent.options, parent.backend, parent.policy.again())
        self.resumes, self.inner, self.share = parent.resumes, parent.inner, parent.share
        self.meets_modules_of(parent)
        if fn.__closure__ is not None and self.options.mode in _PLAIN_MODES:
            self.kin, self.shelf = (parent.backend, self.options), parent.inner.shelf

    def _split(
        self, values: Sequence[Any], items: Callable[[Any], Iterable[Any]], pairs: Callable[[Any], Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments from the bound parameters; `items` and `pairs` open those of `*`
        and `**`."""
        code, rest = self.fn.__code__, list(values)
        positional = [rest.pop(0) for _ in range(code.co_argcount)]
        names = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
        keywords = {name: rest.pop(0) for name in names}
        if code.co_flags & inspect.CO_VARARGS:
            positional += items(rest.pop(0))
        if code.co_flags & inspect.CO_VARKEYWORDS:
            keywords.update(pairs(rest.pop(0)))
        return positional, keywords

    def eager(self, args: tuple[Any, ...], kwnames: tuple[str, ...]) -> Any:
        positional, keywords = self._split(args, iter, dict)
        return self.fn(*positional, **keywords)

    def _run(self, trace: Trace, attempt: Attempt) -> Value:
        args = attempt.call.args
        sources = arg_sources(self.fn.__code__.co_varnames, len(args), ())
        values = [trace.wrap(source, arg) for source, arg in zip(sources, args)]
        positional, keywords = self._split(
            values,
            lambda star: star.unpack(trace),
            lambda stars: {key.as_constant(): value for key, value in stars.load().values()},
        )
        trace.tail = True
        if values and isinstance(values[0], nn_module.NNModuleValue) and self.fn.__name__ == "forward":
            values[0].refuse_disabled(trace)
        owner = Arg(len(args), "self") if attempt.for_all else None
        return root_value(trace, self.fn, owner)[0].call(trace, positional, keywords)


def _inner_dispatcher(function: types.FunctionType, parent: Compiler | None) -> Any:
    """What captures a function entered during a break; None leaves it alone, where the callable is gone."""
    return None if parent is None else InnerCompiler(function, parent).dispatcher()


def _is_gone(row: AnyGuard) -> bool:
    """Whether a guard is of a parameter or buffer without owners: a module is made at each
    call."""
    return type(row) is TensorIs and row.is_gone


def note_break(reason: BreakReason) -> None:
    """Count, log and emit a graph break."""
    counters["breaks"][reason.code] += 1
    emit("break", reason=reason)
    log("breaks", lambda: str(reason))


def _nothing(*tensors: Any) -> tuple[Any, ...]:
    return ()


def no_symbols(device: str, of_data: bool) -> bool:
    """For backends whose graphs hold numbers."""
    return False


def make_dispatcher(
    fn: Callable[..., Any],
    options: CompileOptions,
    backend: Backend,
    symbolic: Callable[[str, bool], bool] = no_symbols,
    states: bool = False,
    kin: Any = None,
    floats: bool = False,
) -> Any:
    """The compiled callable of a function, bound method or `type(module).__call__` method of a module.

    symbolic: whether the backend takes graphs with symbols for sizes of a device's tensors, and (True) for
    such that data decides (asked at each capture). states: whether it takes calls that set states. kin: what
    callables of other modules must have in common with this one to share programs with it; None: none do.
    floats: whether floats that differ between calls may be inputs although sizes are numbers.
    """
    # A guess costs one program of more sizes: cheap to run, unless a recording is made for each set of them.
    guessed: set[Source] | None = set() if options.mode in _PLAIN_MODES else None
    policy = SizePolicy(options.dynamic, symbolic, states=states, floats=floats, guessed=guessed)
    made = Compiler(fn, options, backend, policy)
    if kin is not None and options.mode in _PLAIN_MODES:
        made.kin = (kin, options)
        siblings.enter(made)
    return made.dispatcher()


def eager_texts(events: Iterable[Event]) -> list[str]:
    """What "fallback" events say eager PyTorch runs."""
    return [
        f"a part ({e.data['what']})"
        + (f" at {e.data['where']}" if e.data.get("where") else "")
        + f": {e.data['reason']}"
        for e in events
        if e.data.get("what") in ("op", "graph", "function")
    ]


def served_entries(dispatcher: _C.Dispatcher) -> list[Any]:
    """The entries of a compiled callable, of the rests of functions after its breaks, and of functions
    entered in breaks.
    """
    compiler = dispatcher.miss.__self__
    return [
        entry
        for each in (dispatcher, *compiler.resumes.values(), *compiler.inner.dispatchers())
        for entry in each.entries
    ]


__all__ = ["Captured", "CaptureError", "Compiler", "make_dispatcher"]
