"""The tree speaks of the product alone, and of nothing unfinished."""

import re

from tree import Result

# Written so that this file does not hold them itself.
PATTERNS = {
    "a ticket number": r"\b(?:issue|issues|ticket|pull request|PR)\s+#?\d+\b|(?<![\w&/#(])#\d{1,4}\b(?![-\w])",
    "an assistant": r"\b(?:claude|anthropic|chatgpt|openai codex|copilot|language model helper|ai assistant)\b",
    "how it was written": r"\b(?:this|my|previous) (?:session|turn|prompt)\b|\bhelper session\b",
    "a path of one machine": r"(?<![\w.])/work/(?:main|shared|build)|\.\./shared\b|/tmp/brief",
    "unfinished work": r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
}
LOWER = {"an assistant", "how it was written"}
EXEMPT = ("LICENSE", "proto/google/", "tests/tidy/", "tests/golden/vectors/", "tests/data/", ".gitignore")


def problems_of(name, text):
    for what, pattern in PATTERNS.items():
        flags = re.I if what in LOWER else 0
        for match in re.finditer(pattern, text, flags):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{name}:{line}: {what}: {match.group(0)!r}"


def run(tree):
    result, count = Result(), 0
    for name in tree.files:
        if name.startswith(EXEMPT):
            continue
        text = tree.read(name)
        count += 1
        result.problems += list(problems_of(name, text))
    result.reports.append(f"{count} files")
    return result
