"""Finds the functions of C++ text and their lengths, well enough for a size report."""

import re

NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.M | re.S)
CONTROL = re.compile(r"^\s*(?:if|for|while|switch|do|else|try|catch|return)\b")
SCOPE = re.compile(r"\b(?:namespace|class|struct|union|enum|extern)\b")


def blank(match):
    """Keeps lines and digit separators countable."""
    text = match.group(0)
    return "\n" * text.count("\n") if "\n" in text or text.startswith("/") else '""'


def strip(text):
    text = re.sub(r"(?<=\d)'(?=\d)", "", text)
    text = NOISE.sub(blank, text)
    return DIRECTIVE.sub(lambda m: "\n" * m.group(0).count("\n"), text)


def kind_of(head, in_function):
    """What the brace after `head` opens: a scope, a function, an initializer list's member or some block."""
    if in_function:
        return "block"
    if "(" in head:
        if re.search(r"\)\s*:[^:].*[\w>]\s*$", head, re.S) and not head.rstrip().endswith(")"):
            return "member"
        return "block" if CONTROL.match(head) or re.search(r"=\s*$", head) else "function"
    return "scope" if SCOPE.search(head) else "block"


def functions(text):
    """[(name, first line, lines)] of every function body at namespace or class scope, in order of their ends."""
    found, stack, head, head_start = [], [], "", 1
    line = 1
    for char in strip(text):
        if char == "{":
            in_function = any(kind == "function" for kind, _, _ in stack)
            stack.append((kind_of(head, in_function), head, head_start))
            head = head + " " if stack[-1][0] == "member" else ""
        elif char == "}" and stack:
            kind, opened, first = stack.pop()
            if kind == "function":
                name = re.findall(r"([~\w:]+|operator\W+)\s*\(", opened)
                found.append((name[0] if name else "?", first, line - first + 1))
            head = opened + " _ " if kind == "member" else ""
        elif char == ";" and not (stack and stack[-1][0] == "member"):
            head = ""
        elif char == ":" and head.strip() in ("public", "protected", "private"):
            head = ""
        else:
            if not head.strip() and not char.isspace():
                head_start = line
            head += char
        if char == "\n":
            line += 1
    return found
