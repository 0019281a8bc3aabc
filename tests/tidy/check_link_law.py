"""Each folder has the static library named after it (and perhaps parts of it), and its links obey law.py."""

import re

from check_include_law import folder_of
from law import FREE_TARGETS, LAW, TARGET_NAMES, THIRD_PARTIES
from tree import Result

LIBRARY = re.compile(r"^\s*spectrumkv_library\s*\(\s*(\w+)([^)]*)\)", re.M)
OTHER_LINK = re.compile(r"^\s*target_link_libraries\s*\(\s*(\w+)([^)]*)\)", re.M)
LINK_WORDS = r"\b(?:PUBLIC|PRIVATE|INTERFACE)\b"


def library_name(folder):
    return TARGET_NAMES.get(folder, "spectrumkv_" + folder.rpartition("/")[2])


def read_cmake(tree):
    """{folder: its CMakeLists.txt without comments} for the folders of the law."""
    folders = {name.rpartition("/")[0]: name for name in tree.select(("/CMakeLists.txt",)) if folder_of(name)}
    return {folder: re.sub(r"#.*", "", tree.read(name)) for folder, name in folders.items()}


def folders_of_targets(cmake):
    """{library: folder}: those named after folders, and the parts that folders define beside them."""
    targets = {library_name(folder): folder for folder in LAW}
    for folder, text in cmake.items():
        for library, _ in LIBRARY.findall(text):
            targets.setdefault(library, folder_of(folder + "/x"))
    return targets


def problem_of(folder, target, targets):
    """Why `folder` may not link `target`, or None."""
    if target in FREE_TARGETS or "$" in target:
        return None
    for third, (_, prefixes) in THIRD_PARTIES.items():
        if target.startswith(prefixes):
            return None if third in LAW[folder].third else f"{folder} must not link {target} ({third})"
    if target.startswith("spectrumkv_"):
        other = targets.get(target)
        if other is None:
            return f"{target} is no library of a folder"
        if other != folder and other not in LAW[folder].folders:
            return f"{folder} must not link {target} ({other})"
    return None


def linked(arguments):
    parts = re.split(LINK_WORDS, arguments, maxsplit=1)
    return [word for word in parts[1].split() if not re.fullmatch(LINK_WORDS, word)] if len(parts) == 2 else []


def run(tree):
    result, cmake = Result(), read_cmake(tree)
    targets = folders_of_targets(cmake)
    with_code = {folder_of(f) for f in tree.select((".cc",), ("server/", "kernels/", "client/cpp"))} - {"server", None}
    for folder in sorted(with_code):
        if folder not in cmake:
            result.problems.append(f"{folder}: has code but no CMakeLists.txt")
            continue
        libraries = [library for library, _ in LIBRARY.findall(cmake[folder])]
        if libraries.count(library_name(folder)) != 1:
            result.problems.append(f"{folder}/CMakeLists.txt: spectrumkv_library({library_name(folder)} ...) expected, "
                                   f"found: {', '.join(libraries) or 'none'}")
        result.problems += [f"{folder}/CMakeLists.txt: {library} belongs to {targets[library]}"
                            for library in libraries if targets[library] != folder]
    for folder, text in sorted(cmake.items()):
        for _, arguments in LIBRARY.findall(text) + OTHER_LINK.findall(text):
            problems = (problem_of(folder_of(folder + "/x"), target, targets) for target in linked(arguments))
            result.problems += [f"{folder}/CMakeLists.txt: {problem}" for problem in problems if problem]
    result.reports.append(f"{len(with_code)} folders with their libraries")
    return result
