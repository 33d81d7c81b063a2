"""The conventions as rules that can turn red.

A rule takes the root of a source tree and returns its complaints, one line each, empty when the
tree is fine. What a rule exempts stands in a table beside it, with the reason.
tests/test_architecture.py runs all of them.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOMS = ("parallel", "model", "actors")
LANGUAGE_ROOTS = (*ROOMS, "benchmarks", "examples")
ALL_ROOTS = (*LANGUAGE_ROOTS, "tests")

NEVER_IMPORTED = {
    "parallel": {"outrider.model", "outrider.actors", "ray", "transformers"},
    "model": {"outrider.actors", "ray", "fastapi"},
    "actors": {"torch_npu", "triton", "flash_attn", "fla"},
    "actors/http": {f"outrider.actors.{door}" for door in ("engine", "serve", "job", "cli")},
    "actors/driver": {"outrider.actors.http", "outrider.actors.engine"},
    "actors/ranks": {"outrider.actors.http", "outrider.actors.engine", "outrider.actors.driver"},
    "actors/cluster": {f"outrider.actors.{room}" for room in ("http", "driver", "ranks")},
}
DEVICE_LIBRARIES = {"torch_npu", "triton", "flash_attn", "fla", "cuda", "pynvml"}
DEVICE_LIBRARY_HOMES = ("parallel/backends/", "parallel/kernels/")
HOST_SYNCS = {"item", "tolist", "cpu", "numpy"}
HOST_SYNC_HOMES = {
    "model/runner.py": "the one place where the host waits for the device",
    "parallel/backends/": "device interfaces that take lengths as host lists",
}
ENVIRONMENT_HOMES = {
    "actors/cluster/placement.py": "what Ray and device runtimes want in a rank's process",
    "actors/ranks/rank.py": "sets what torch reads when it is imported",
    "actors/ranks/actor.py": "reads what placement set for its device",
    "actors/cluster/haproxy.py": "how Ray Serve is told to start HAProxy",
    "actors/cluster/loopback.py": "ports and addresses of a private cluster, which Ray reads",
    "actors/cluster/doctor.py": "shows what is set",
}
CLUSTER_FILE_READER = "actors/cluster/reader.py"
BROAD_EXCEPTS = {
    "actors/console.py::run": "outermost frame: one line on stderr and an exit code for any error",
    "actors/driver/scheduler.py::_accept": "a fault in one request's text is that request's",
    "actors/driver/server.py::_answer": "outermost frame of a call: its caller waits",
    "tests/ranks.py::body": "a thread hands its exception to the test, which raises it",
}
"""path::function -> why it may swallow an exception it cannot name."""
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "types", "common", "misc"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
MAX_CORE_LINES, MAX_KERNEL_LINES = 16_000, 3600
KERNELS = "parallel/kernels/"
DOCSTRING_LINES = range(3, 9)


@dataclass(frozen=True)
class Source:
    """One Python file; `path` is relative to the root, with forward slashes."""

    path: str
    text: str
    tree: ast.Module

    def says(self, node: ast.AST | int, complaint: str) -> str:
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        return f"{self.path}:{line}: {complaint}"

    def is_in(self, homes: tuple[str, ...] | dict[str, str]) -> bool:
        return self.path.startswith(tuple(homes))


def sources(root: Path, tops: tuple[str, ...]) -> Iterator[Source]:
    for top in tops:
        for file in sorted((root / top).rglob("*.py")):
            text = file.read_text("utf-8")
            yield Source(file.relative_to(root).as_posix(), text, ast.parse(text))


def imports(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Dotted names of all imports, also lazy ones, type-only ones and import_module("...")."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names=names):
                yield from ((node, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from ((node, f"{module}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node, name


def dotted(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """All that is imported and all attributes as written, such as os.environ."""
    yield from imports(source)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            yield node, ast.unparse(node)


def code_lines(source: Source) -> set[int]:
    """Numbers of the lines that hold code: no blank lines, comments and docstrings."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in silent and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and _is_text(node.value):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def doors_open_one_way(root: Path) -> list[str]:
    return [
        source.says(node, f"{room} never imports {foreign}")
        for room, never in NEVER_IMPORTED.items()
        for source in sources(root, (room,))
        for node, name in imports(source)
        for foreign in never
        if f"{name}.".startswith(f"{foreign}.")
    ]


def device_libraries_stay_in_backends(root: Path) -> list[str]:
    return [
        source.says(node, f"{name}: device libraries live in {' and '.join(DEVICE_LIBRARY_HOMES)}")
        for source in sources(root, ROOMS)
        if not source.is_in(DEVICE_LIBRARY_HOMES)
        for node, name in imports(source)
        if name.split(".")[0] in DEVICE_LIBRARIES
    ]


def chips_are_not_named_outside_parallel(root: Path) -> list[str]:
    """model and actors ask a Device for a capability; torch.cuda and torch.npu are parallel's."""
    return [
        source.says(node, f"{name}: ask parallel.device for it")
        for source in sources(root, ("model", "actors"))
        for node, name in dotted(source)
        if name in {"torch.cuda", "torch.npu"}
    ]


def host_syncs_stay_in_the_runner(root: Path) -> list[str]:
    complaints = []
    for source in sources(root, ROOMS):
        for node in ast.walk(source.tree):
            match node:
                case ast.Call(func=ast.Attribute(attr=name), args=[]) if name in HOST_SYNCS:
                    pass
                case ast.Call(func=ast.Attribute(attr="to"), args=[ast.Constant("cpu"), *_]):
                    name = "to('cpu')"
                case _:
                    continue
            if not source.is_in(HOST_SYNC_HOMES):
                homes = ", ".join(HOST_SYNC_HOMES)
                complaints.append(source.says(node, f".{name}: the host waits only in {homes}"))
    return complaints


def environment_is_no_configuration(root: Path) -> list[str]:
    return [
        source.says(node, f"{name}: configuration comes from {CLUSTER_FILE_READER}")
        for source in sources(root, ROOMS)
        if not source.is_in(ENVIRONMENT_HOMES)
        for node, name in dotted(source)
        if name in {"os.environ", "os.getenv", "os.putenv"}
    ]


def one_file_reads_yaml(root: Path) -> list[str]:
    return [
        source.says(node, f"yaml is read in {CLUSTER_FILE_READER} only")
        for source in sources(root, ROOMS)
        if source.path != CLUSTER_FILE_READER
        for node, name in imports(source)
        if name.split(".")[0] == "yaml"
    ]


def files_are_short(root: Path) -> list[str]:
    counted = ((source, len(code_lines(source))) for source in sources(root, ALL_ROOTS))
    return [
        source.says(1, f"{count} code lines, at most {MAX_FILE_LINES}")
        for source, count in counted
        if count > MAX_FILE_LINES
    ]


def functions_are_short(root: Path) -> list[str]:
    complaints = []
    for source in sources(root, ALL_ROOTS):
        lines = code_lines(source)
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = len(lines & set(range(node.lineno, (node.end_lineno or 0) + 1)))
                if count > MAX_FUNCTION_LINES:
                    rule = f"{node.name}: {count} code lines, at most {MAX_FUNCTION_LINES}"
                    complaints.append(source.says(node, rule))
    return complaints


def core_is_small(root: Path) -> list[str]:
    """Kernels count apart: leaves that a reader of the rooms need not open."""
    kernels = rest = 0
    for source in sources(root, ROOMS):
        if source.path.startswith(KERNELS):
            kernels += len(code_lines(source))
        else:
            rest += len(code_lines(source))
    complaints = []
    if rest >= MAX_CORE_LINES:
        complaints.append(f"{', '.join(ROOMS)}: {rest} code lines, fewer than {MAX_CORE_LINES}")
    if kernels >= MAX_KERNEL_LINES:
        complaints.append(f"{KERNELS}: {kernels} code lines, fewer than {MAX_KERNEL_LINES}")
    return complaints


def modules_open_with_a_map(root: Path) -> list[str]:
    complaints = []
    for source in sources(root, LANGUAGE_ROOTS):
        text = ast.get_docstring(source.tree) or ""
        count = sum(1 for line in text.splitlines() if line.strip())
        if count not in DOCSTRING_LINES and not source.path.endswith("__init__.py"):
            rule = (
                f"module docstring of {count} lines, {DOCSTRING_LINES[0]} to {DOCSTRING_LINES[-1]}"
            )
            complaints.append(source.says(1, rule))
    return complaints


def packages_hold_no_code(root: Path) -> list[str]:
    return [
        source.says(node, "__init__.py holds a docstring at most")
        for source in sources(root, ALL_ROOTS)
        if source.path.endswith("__init__.py")
        for node in source.tree.body
        if not (isinstance(node, ast.Expr) and _is_text(node.value))
    ]


def imports_are_absolute(root: Path) -> list[str]:
    return [
        source.says(node, "relative import: write it from the room's name")
        for source in sources(root, ALL_ROOTS)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]


def imports_form_no_circle(root: Path) -> list[str]:
    """Lazy and type-only imports count: a module can be read once what it imports has been."""
    trees = {source.path.removesuffix(".py"): source for source in sources(root, LANGUAGE_ROOTS)}
    graph = {
        path: {found for _, name in imports(source) if (found := _module_of(name, trees))} - {path}
        for path, source in trees.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1]
        words = " <- ".join(f"{path}.py" for path in circle)
        return [f"{circle[-1]}.py:1: imports form a circle: {words}"]
    return []


def _module_of(name: str, paths: Collection[str]) -> str | None:
    """The file, without its suffix, that a dotted name of ours is or lies in."""
    parts = name.removeprefix("outrider.").split(".")
    candidates = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((path for path in candidates if path in paths), None)


def our_code_is_imported_under_one_name(root: Path) -> list[str]:
    """Never as `actors` or `model`: a user's own folder may have that name."""
    return [
        source.says(node, f"{name}: import it as outrider.{name}")
        for source in sources(root, ALL_ROOTS)
        for node, name in imports(source)
        if name.split(".")[0] in (*ROOMS, "benchmarks")
    ]


def names_say_what_is_inside(root: Path) -> list[str]:
    return [
        source.says(1, f"{part}: a type or function lives in the lowest room that uses it")
        for source in sources(root, ALL_ROOTS)
        for part in Path(source.path).with_suffix("").parts
        if part in VAGUE_NAMES
    ]


def failures_are_not_swallowed(root: Path) -> list[str]:
    complaints = []
    for source in sources(root, ALL_ROOTS):
        for function, node in _handlers(source.tree, ""):
            caught = ast.unparse(node.type) if node.type else "everything"
            broad = node.type is None or {"Exception", "BaseException"} & _names(node.type)
            raises = any(isinstance(n, ast.Raise) for part in node.body for n in ast.walk(part))
            if broad and not raises and f"{source.path}::{function}" not in BROAD_EXCEPTS:
                rule = f"{function or 'module'} swallows {caught}: name the exception or re-raise"
                complaints.append(source.says(node, rule))
    return complaints


def _handlers(tree: ast.AST, function: str) -> Iterator[tuple[str, ast.ExceptHandler]]:
    """Each except clause with the name of the function around it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ExceptHandler):
            yield function, node
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _handlers(node, node.name if named else function)


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def readme_tree_equals_the_disk(root: Path) -> list[str]:
    """README's ```tree block: two blanks a level, a folder ends in /, then its description.

    The rooms are listed to the last file; another folder either not at all or one level whole.
    """
    readme = (root / "README.md").read_text("utf-8")
    block = readme.partition("```tree\n")[2].partition("```")[0]
    listed: set[str] = set()
    folders: list[str] = []
    for line in filter(str.strip, block.splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [line.split()[0]]
        listed.add("".join(folders))
    opened = {path.rpartition("/")[0] for path in (entry.rstrip("/") for entry in listed)} - {""}
    disk = set(_entries(root, root, opened))
    absent = [f"README.md: the tree lacks {path}" for path in sorted(disk - listed)]
    return absent + [f"README.md: the tree names {path}" for path in sorted(listed - disk)]


def pages_name_files_that_exist(root: Path) -> list[str]:
    """A file of ours is written with its folder, from the root of the project or from tests/.

    docs/log.md tells what was, and names what is gone.
    """
    name = re.compile(rf"(?<![\w./-])(?:{'|'.join((*ALL_ROOTS, 'docs'))})/[\w./-]*\.\w+")
    return [
        f"{path}:{number}: {file} does not exist"
        for path, number, line in _lines_of_pages(root)
        for file in name.findall(line)
        if path != "docs/log.md" and not any((root / top / file).exists() for top in ("", "tests"))
    ]


def merges_are_finished(root: Path) -> list[str]:
    return [
        f"{path}:{number}: what a conflict left: {line}"
        for path, number, line in _lines_of_pages(root)
        if line.startswith(("<<<<<<< ", ">>>>>>> "))
    ]


def _lines_of_pages(root: Path) -> Iterator[tuple[str, int, str]]:
    """(path, number, line) of all Markdown at the root and in docs/."""
    for page in sorted([*root.glob("*.md"), *root.glob("docs/*.md")]):
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
            yield page.relative_to(root).as_posix(), number, line


def _entries(root: Path, folder: Path, opened: set[str]) -> Iterator[str]:
    generated = {"__pycache__", "build", "dist", "out", "checkpoints"}
    for path in folder.iterdir():
        name = path.relative_to(root).as_posix()
        if path.name.startswith(".") or path.name in generated or path.suffix == ".egg-info":
            continue
        yield name + "/" * path.is_dir()
        if path.is_dir() and (name in opened or name.split("/")[0] in ROOMS):
            yield from _entries(root, path, opened)


Rule = Callable[[Path], list[str]]
RULES: tuple[Rule, ...] = (
    doors_open_one_way,
    device_libraries_stay_in_backends,
    chips_are_not_named_outside_parallel,
    host_syncs_stay_in_the_runner,
    environment_is_no_configuration,
    one_file_reads_yaml,
    files_are_short,
    functions_are_short,
    core_is_small,
    modules_open_with_a_map,
    packages_hold_no_code,
    imports_are_absolute,
    imports_form_no_circle,
    our_code_is_imported_under_one_name,
    names_say_what_is_inside,
    failures_are_not_swallowed,
    readme_tree_equals_the_disk,
    pages_name_files_that_exist,
    merges_are_finished,
)
