"""The shape of the project: who may import whom, what may never be imported, how long a file may be."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from dynamotor import extension_api

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dynamotor"
XLA = ROOT / "xla" / "dynamotor" / "xla"  # of the distribution dynamotor-xla

# Lower rank may not import higher; equal rank may not import each other unless it is the same room.
RANK = {
    "base": 0,
    "graph": 1,
    "capture": 2,
    "autograd": 2,
    "lower": 2,
    "runtime": 2,
    "codegen": 3,
    "distributed": 4,
    "torch_compile_adapter": 4,
    "foreign": 5,
    "backends": 6,
    "autobackend": 7,
    "_module": 6,
    "api": 7,
    "step": 8,
    "extension_api": 9,
    "tools": 9,
    "__init__": 10,
    "__main__": 11,
}
FORBIDDEN = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch.aot_autograd",
    "torch._functorch._aot_autograd",
    "torch_xla",
)
MAY_IMPORT_FORBIDDEN = {"torch_compile_adapter.py"}
CORE = sorted(PACKAGE.rglob("*.py"))
SOURCES = CORE + sorted(XLA.rglob("*.py"))
# Modules of dynamotor-xla that have the names of torch_xla's API: its top layer.
XLA_API = {
    *("_XLAC", "_dynamo", "_internal", "alias", "amp", "backends", "core", "debug", "distributed"),
    *("experimental", "install", "runtime", "stablehlo", "test", "toplevel", "torch_compile"),
    *("torch_compile_openxla", "utils"),
}


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(parse(path))]


def inside(path: Path) -> Path:
    """A file's place in the package, whichever distribution installs it."""
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else XLA.parent)


def room_of(path: Path) -> str:
    parts = inside(path).parts
    return parts[0] if len(parts) > 1 else parts[0].removesuffix(".py")


def _with_place(node: ast.AST, nested: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Statements and what holds them, and whether they are in a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield child, nested
            yield from _with_place(
                child, nested or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            )


@functools.cache
def imported_modules(path: Path) -> list[tuple[int, str, bool]]:
    """(line, absolute module name, whether inside a function) of each import in a file."""
    tree = parse(path)
    package = ("dynamotor", *inside(path).parts[:-1])
    found = []
    for node, nested in _with_place(tree, False):
        if isinstance(node, ast.Import):
            found += [(node.lineno, a.name, nested) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - (node.level - 1)] if node.level else ()
            module = ".".join((*base, node.module) if node.module else base)
            found += [
                (node.lineno, module if a.name == "*" else f"{module}.{a.name}", nested) for a in node.names
            ]
    return found


def own_room(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "dynamotor":
        return None
    if len(parts) == 1:
        return "__init__"
    return parts[1] if parts[1] in RANK else None


@functools.cache
def imports() -> list[tuple[Path, str, str, bool]]:
    """(file, where it is, absolute module name, whether inside a function) of each import."""
    return [
        (path, f"{inside(path)}:{line}: {module}", module, nested)
        for path in SOURCES
        for line, module, nested in imported_modules(path)
    ]


def test_imports_point_down() -> None:
    wrong = []
    for path, text, module, _ in imports():
        room, other = room_of(path), own_room(module)
        if room != "xla" and other is not None and other != room and RANK[other] >= RANK[room]:
            wrong.append(text)
    assert not wrong


# Rules name these classes in their annotations, and the modules of these classes import all rules. No other module needs
# another one for its types alone.
FOR_TYPES = {("values/base.py", "ResultEmitter"), ("values/base.py", "Trace")}


def test_modules_do_not_import_each_other_for_types() -> None:
    found = set()
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                own = [n for n in node.body if isinstance(n, ast.ImportFrom) and n.level]
                found |= {("/".join(path.parts[-2:]), alias.name) for n in own for alias in n.names}
    assert found == FOR_TYPES


def test_no_two_modules_of_the_core_share_a_name() -> None:
    names = Counter(path.stem for path in CORE if path.name != "__init__.py")
    assert not [name for name, count in names.items() if count > 1]


def test_no_two_test_files_are_the_same_module() -> None:
    """pytest imports a test by its file's name, unless its folder is a package: a second one is not collected."""
    files = [p for d in ("tests", "xla/tests") for p in (ROOT / d).rglob("test_*.py")]
    names = Counter(p.name for p in files if not (p.parent / "__init__.py").exists())
    assert not [name for name, times in names.items() if times > 1]


def test_the_core_names_no_module_of_an_extension() -> None:
    """Neither in imports nor in texts to be imported; extensions register their parts (base/extensions.py)."""
    named = [
        text for path, text, module, _ in imports() if path in CORE and module.startswith("dynamotor.xla")
    ]
    for path in CORE:
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"dynamotor\.xla[\w.:]*", node.value) and path.name != "extensions.py":
                    named.append(f"{inside(path)}:{node.lineno}: {node.value}")
    assert not named


def test_dynamotor_xla_uses_the_interface_for_extensions_and_nothing_else_of_the_core() -> None:
    used = {
        module: text
        for path, text, module, _ in imports()
        if path not in CORE and module.startswith("dynamotor.") and not module.startswith("dynamotor.xla.")
    }
    offered = {f"dynamotor.extension_api.{name}" for name in extension_api.__all__}
    assert not [text for module, text in used.items() if module not in offered]
    assert offered == set(used)  # what nothing uses is no part of the interface


def test_the_api_of_torch_xla_is_the_top_layer() -> None:
    below = [
        text
        for path, text, module, _ in imports()
        if path not in CORE
        and inside(path).with_suffix("").parts[1] not in XLA_API | {"__init__"}
        and module.startswith("dynamotor.xla.")
        and module.split(".")[2] in XLA_API
    ]
    assert not below


def test_own_imports_stand_at_the_top() -> None:
    assert not [text for _, text, module, nested in imports() if nested and module.startswith("dynamotor")]


def test_the_package_names_no_module_of_the_development_packages() -> None:
    """bench and fuzz import the compiler; they register their checks with base/development.py."""
    assert not [text for _, text, module, _ in imports() if module.partition(".")[0] in ("bench", "fuzz")]
    texts = [
        f"{inside(path)}:{node.lineno}: {node.value}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"(bench|fuzz)\.\w+", node.value)
    ]
    assert not texts


def test_what_the_project_replaces_is_not_imported() -> None:
    assert not [
        text
        for path, text, module, _ in imports()
        if module.startswith(FORBIDDEN) and path.name not in MAY_IMPORT_FORBIDDEN
    ]


# Documented, though their names begin with an underscore; and torch's names for Python itself.
_DOCUMENTED = re.compile(r"torch\.(ops\.|_check|_assert|_foreach_|__\w+__)")


def _names_from_torch(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import and attribute chain that begins at torch."""
    known = {}
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                known[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            base, _, rest = ast.unparse(node).partition(".")
            if base in known and re.fullmatch(r"[\w.]+", rest):
                yield node.lineno, f"{known[base]}.{rest}"


def test_private_names_of_pytorch_come_from_one_module() -> None:
    """Operators and documented names apart (`base/compat.py` has the rule)."""
    wrong = []
    for path in SOURCES:
        if path.name in ("compat.py", "probe.py"):  # of the core, of dynamotor-xla
            continue
        for line, name in _names_from_torch(path):
            private = next((part for part in name.split(".") if re.match("_(?!_)", part)), "")
            operator = name == f"torch.{private}" and hasattr(torch.ops.aten, private)
            if name.startswith("torch.") and private and not operator and not _DOCUMENTED.match(name):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert not wrong


def test_every_row_of_private_names_is_used() -> None:
    rows = r"^ *(\w+) = (?:probe\.|_)?(?:name|late|attribute)\("
    unused = []
    for table, files in ((PACKAGE / "base/compat.py", CORE), (XLA / "compat.py", sorted(XLA.rglob("*.py")))):
        text = "\n".join(path.read_text() for path in files)
        used = set(re.findall(r"\bcompat\.(\w+)|^ +(\w+),$", text, re.M))
        names = {name for pair in used for name in pair}
        names.update(*(re.findall(r"\w+", line) for line in re.findall(r"\bimport (.*)", text)))
        names.update(re.findall(r"\b(_\w+)[(.]", table.read_text()))  # rows of the table's own functions
        unused += [row for row in re.findall(rows, table.read_text(), re.M) if row not in names]
    assert not unused


def test_no_file_is_over_a_thousand_lines() -> None:
    files = [
        p
        for d in ("dynamotor", "tests", "xla", "bench", "fuzz")
        for ext in ("py", "c", "h")
        for p in (ROOT / d).rglob(f"*.{ext}")
    ]
    too_long = {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > 1000}
    assert not too_long


def test_functions_fit_on_a_screen() -> None:
    long = {
        f"{inside(path)}:{node.lineno}": node.name
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 75
    }
    assert not long


# Rooms with long lines yet.
LONG_LINES = {"capture"}


def test_lines_are_short() -> None:
    assert not [
        f"{inside(path)}:{number}"
        for path in SOURCES
        if room_of(path) not in LONG_LINES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(re.sub(r"  # (type: ignore|noqa).*", "", line)) > 110
    ]


def test_module_docstrings_are_short() -> None:
    long = {}
    for path in SOURCES:
        doc = (
            ast.get_docstring(parse(path)) if path.name != "__init__.py" else ""
        )  # a room's holds its contract
        if doc and len(doc.splitlines()) > 12:
            long[str(path.relative_to(ROOT))] = len(doc.splitlines())
    assert not long


def test_a_private_name_is_used_in_its_file_alone() -> None:
    lent = []
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.level:
                private = [a.name for a in node.names if re.match("_[a-z]", a.name)]
                lent += [f"{path.relative_to(ROOT)}: {name}" for name in private]
    assert not lent


def test_a_broad_handler_raises_or_says_why_it_is_broad() -> None:
    silent = []
    for path in SOURCES:
        lines = path.read_text().splitlines()
        for node in nodes(path):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = ast.unparse(node.type) if node.type is not None else "BaseException"
            raises = ast.unparse(node.body[-1]).startswith("raise")  # `raise_coded(error)` does, too
            if (
                re.search(r"\b(Base)?Exception\b", caught)
                and not raises
                and "  # " not in lines[node.lineno - 1]
            ):
                silent.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not silent


def test_no_text_holds_the_id_of_an_object() -> None:
    """CPython gives the id of a freed object to another one: a warning of the first would silence the second's."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.FormattedValue)
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "id", "") == "id"
    ]
    assert not found


# Raised in several rooms, for the same reason: an op that capture, shapes or the recorder meets first.
MET_ANYWHERE = {"DM108", "DM201", "DM210", "DM213", "DM229", "DM236", "DM241", "DM301", "DM303", "DM922"}


def test_an_error_code_has_one_row_and_one_room() -> None:
    rows = re.findall(r"^\| (DM\d{3}) \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    rooms: dict[str, set[str]] = {}
    for path in [*SOURCES, *(ROOT / "bench").glob("*.py"), *(PACKAGE / "csrc").glob("*.[ch]*")]:
        room = "bench" if path.parent == ROOT / "bench" else room_of(path)
        for code in re.findall(r"(?:\"|dynamotor, )(DM\d{3})(?=[\":)])", path.read_text()):
            rooms.setdefault(code, set()).add(room)
    assert sorted(rows) == sorted(rooms)
    assert {code for code, found in rooms.items() if len(found) > 1} == MET_ANYWHERE


# Names that a program's own (torch_xla's, PyTorch's) or another room's has too; the list only gets shorter.
TWICE = {"Context", "Guard", "Program", "Trace", "Unsupported", "Writer"}


def test_a_class_has_its_name_for_itself() -> None:
    places: dict[str, set[str]] = {}
    for path in SOURCES:
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(room_of(path))
    assert {name for name, rooms in places.items() if len(rooms) > 1} <= TWICE


def test_no_test_patches_a_constant() -> None:
    """A value that a test changes is a setting or an argument."""
    patched = re.compile(r"\.setattr\(\s*[\w.]+,\s*\"_?[A-Z][A-Z_]+\"")
    files = [path for tests in ("tests", "xla/tests") for path in (ROOT / tests).rglob("*.py")]
    assert not [path for path in files if patched.search(path.read_text())]
