"""Includes obey law.py."""

import re

from law import LAW, THIRD_PARTIES
from tree import Result

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.M)
OUR_TOPS = ("kernels/", "server/", "client/", "cmake/", "tests/")


def folder_of(name):
    """The longest folder of the law that holds this file, or None. "server" itself holds main.cc alone."""
    folder = name.rpartition("/")[0]
    if folder in LAW:
        return folder
    parents = (folder[:i] for i in range(len(folder) - 1, 0, -1) if folder[i] == "/")
    return next((parent for parent in parents if parent in LAW and parent != "server"), None)


def third_of(header):
    for third, (prefixes, _) in THIRD_PARTIES.items():
        if header.startswith(prefixes):
            return third
    return None


def problem_of(folder, header):
    """Why `folder` may not include `header`, or None."""
    rule = LAW[folder]
    if header.startswith("spectrumkv/") and not header.startswith("spectrumkv/v1/"):
        header = "client/sdk/" + header  # included as where it is installed
    if header.startswith(OUR_TOPS):
        target = folder_of(header)
        if header.startswith("tests/"):
            return "product code never includes from tests"
        if target is None:
            return f"{header} lies in no folder of tests/tidy/law.py"
        if target != folder and target not in rule.folders:
            return f"{folder} must not depend on {target}"
        return None
    third = third_of(header)
    if third and third not in rule.third:
        return f"{folder} must not use {third}"
    if header in rule.forbidden:
        return f"{folder} must not use <{header}>"
    return None


# Kernels are compiled by nvcc and, for tests, as C++ for the CPU: what only nvcc knows stands beside the launches.
ONLY_NVCC = re.compile(r"<<<|\basm\b|\bcooperative_groups\b")


def run(tree):
    result = Result()
    sources = tree.select((".h", ".cc", ".cu", ".cuh"), ("server/", "kernels/", "client/"))
    for name in sources:
        folder = folder_of(name)
        if folder is None:
            result.problems.append(f"{name}: its folder is not in tests/tidy/law.py")
            continue
        text = tree.read(name)
        for match in INCLUDE.finditer(text):
            problem = problem_of(folder, match.group(2))
            if problem:
                line = text.count("\n", 0, match.start(2)) + 1
                result.problems.append(f"{name}:{line}: {problem}")
        for match in ONLY_NVCC.finditer(text) if name.endswith(".cuh") else ():
            line = text.count("\n", 0, match.start()) + 1
            result.problems.append(f"{name}:{line}: kernels must not use {match.group()}")
    result.reports.append(f"{len(sources)} files obey the include law")
    return result
