"""Files and functions stay small enough to read. Aim far below these limits (CONTRIBUTING.md)."""

import ast

from cpp_functions import functions
from tree import Result

FILE_LINES, TEST_FILE_LINES = 500, 700
FUNCTION_LINES, TEST_FUNCTION_LINES = 100, 150
# Functions that are one table of data.
TABLES = {"MakeServerKeys", "MakeMemoryKeys", "MakeTransferKeys", "MakeCounters"}
TABLE_LINES = 200
SOURCES = (".h", ".cc", ".cu", ".cuh", ".py", ".sh", ".proto")
TOP = 5


def python_functions(text):
    nodes = (n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return [(n.name, n.lineno, n.end_lineno - n.lineno + 1) for n in nodes]


def functions_of(name, text):
    return python_functions(text) if name.endswith(".py") else functions(text)


def run(tree):
    result, files, bodies = Result(), [], []
    for name in tree.select(SOURCES):
        if name.startswith("proto/google/"):
            continue
        text = tree.read(name)
        test = name.startswith("tests/")
        lines = text.count("\n")
        files.append((lines, name))
        limit = TEST_FILE_LINES if test else FILE_LINES
        if lines > limit:
            result.problems.append(f"{name}: {lines} lines, the limit is {limit}")
        if not name.endswith((".h", ".cc", ".cu", ".cuh", ".py")):
            continue
        limit = TEST_FUNCTION_LINES if test else FUNCTION_LINES
        for function, first, length in functions_of(name, text):
            bodies.append((length, f"{name}:{first} {function}"))
            most = TABLE_LINES if function in TABLES else limit
            if length > most:
                result.problems.append(f"{name}:{first}: {function} has {length} lines, the limit is {most}")
    for title, sizes in (("files", files), ("functions", bodies)):
        result.reports.append(f"{len(sizes)} {title}; the longest:")
        result.reports += [f"  {lines:4d}  {name}" for lines, name in sorted(sizes, reverse=True)[:TOP]]
    return result
