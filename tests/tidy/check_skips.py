"""A failure never looks like a skip: a test is skipped by its exit status, 77, and says why by a line SKIPPED: reason."""

import re

from tree import Result

# CTest takes a test whose output matches for skipped, whatever its exit status.
BY_WORDS = re.compile(r"\bSKIP_REGULAR_EXPRESSION\b")
# A shell script that says that it skips must not say that it passed.
SAYS = re.compile(r"^(?P<indent>[ \t]*)echo [\"']SKIPPED:.*\n(?P=indent)exit (?P<status>\S+)", re.M)


def run(tree):
    result = Result()
    cmake = [name for name in tree.files if name.endswith(("CMakeLists.txt", ".cmake"))]
    for name in cmake:
        for match in BY_WORDS.finditer(tree.read(name)):
            line = tree.read(name).count("\n", 0, match.start()) + 1
            result.problems.append(f"{name}:{line}: skips by words; use SKIP_RETURN_CODE 77")
    scripts = tree.select((".sh",), ("tests/",))
    for name in scripts:
        text = tree.read(name)
        for match in SAYS.finditer(text):
            if match.group("status") != "77":
                line = text.count("\n", 0, match.end()) + 1
                result.problems.append(f"{name}:{line}: says SKIPPED and exits {match.group('status')}, not 77")
    result.reports.append(f"{len(cmake)} CMake files, {len(scripts)} scripts of tests")
    return result
