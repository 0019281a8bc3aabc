"""Every metric, configuration key and RPC is documented."""

import re

from tree import Result

METRIC = re.compile(r'"(spectrumkv_[a-z0-9_]+)"')
KEY = re.compile(r'\{\s*"([a-z0-9_]+(?:\.[a-z0-9_]+)+)",\s*KeyKind::')
DECLARATION = re.compile(r"^(\s*)(rpc|message|enum|service)\s+(\w+)")
PURE = re.compile(r"(Request|Response)$")
KEYS_FILES, METRICS_FOLDER = "server/config/keys", "server/metrics/"


def undocumented_declarations(text):
    """[(line, kind, name)] of declarations without a comment above. Pure requests and responses, and services, whose
    file comment says what they are, need none."""
    found, lines = [], text.split("\n")
    for number, line in enumerate(lines, 1):
        match = DECLARATION.match(line)
        if not match:
            continue
        _, kind, name = match.groups()
        above = lines[number - 2].strip() if number >= 2 else ""
        if not above.startswith("//") and not (kind == "message" and PURE.search(name)) and kind != "service":
            found.append((number, kind, name))
    return found


def check_protos(tree, result):
    count = 0
    for name in tree.select((".proto",), ("proto/spectrumkv/",)):
        text = tree.read(name)
        if not text.startswith("//"):
            result.problems.append(f"{name}:1: begins without a comment that says what it is for")
        for line, kind, declared in undocumented_declarations(text):
            result.problems.append(f"{name}:{line}: {kind} {declared} has no comment")
        count += len(re.findall(r"^\s*rpc\s", text, re.M))
    result.reports.append(f"{count} RPCs")


def check_names(tree, result, what, names, document):
    """Each name stands in backticks in the document, and the document names nothing else of that kind."""
    result.reports.append(f"{len(names)} {what}s")
    if not names:
        return
    if not tree.has(document):
        result.problems.append(f"{document} is missing; it must name {len(names)} {what}s")
        return
    text = tree.read(document)
    for name in sorted(names):
        if not re.search(r"`" + re.escape(name) + r"(`|\{)", text):
            result.problems.append(f"{document}: {what} `{name}` is not documented")


def check_stale_metrics(tree, result, names):
    """Documented metrics exist, histograms' series aside."""
    text = tree.read("docs/metrics.md") if tree.has("docs/metrics.md") else ""
    for name in sorted(set(re.findall(r"`(spectrumkv_[a-z0-9_]+)[`{]", text))):
        if re.sub(r"_(bucket|sum|count)$", "", name) not in names and name not in names:
            result.problems.append(f"docs/metrics.md: there is no metric `{name}`")


def run(tree):
    result = Result()
    check_protos(tree, result)
    metrics = set()
    for name in tree.select((".cc", ".h"), (METRICS_FOLDER,)):
        metrics |= set(METRIC.findall(tree.read(name)))
    check_names(tree, result, "metric", metrics, "docs/metrics.md")
    if metrics:
        check_stale_metrics(tree, result, metrics)
    keys = {key for name in tree.select((".cc",), (KEYS_FILES,)) for key in KEY.findall(tree.read(name))}
    check_names(tree, result, "configuration key", keys, "docs/configuration.md")
    return result
