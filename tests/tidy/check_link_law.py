"""One static library per folder, and its links obey law.py."""

import re

from check_include_law import folder_of
from law import FREE_TARGETS, LAW, TARGET_FOLDERS, THIRD_PARTIES
from tree import Result

LIBRARY = re.compile(r"^\s*spectrumkv_library\s*\(\s*(\w+)([^)]*)\)", re.M)
OTHER_LINK = re.compile(r"^\s*target_link_libraries\s*\(\s*(\w+)([^)]*)\)", re.M)
KEYWORDS = {"PUBLIC", "PRIVATE", "INTERFACE", "SOURCES"}


def folder_of_target(target):
    if target in TARGET_FOLDERS:
        return TARGET_FOLDERS[target]
    short = target.removeprefix("spectrumkv_")
    return next((folder for folder in LAW if folder.endswith("/" + short)), None)


def problem_of(folder, target):
    """Why `folder` may not link `target`, or None."""
    if target in FREE_TARGETS or target in KEYWORDS or "$" in target:
        return None
    for third, (_, prefixes) in THIRD_PARTIES.items():
        if target.startswith(prefixes):
            return None if third in LAW[folder].third else f"{folder} must not link {target} ({third})"
    if target.startswith("spectrumkv_"):
        other = folder_of_target(target)
        if other is None:
            return f"{target} is no library of a folder"
        if other != folder and other not in LAW[folder].folders:
            return f"{folder} must not link {target} ({other})"
    return None


def check_links(name, folder, arguments, result):
    linked = re.sub(r"#.*", "", arguments)
    linked = re.split(r"\b(?:PUBLIC|PRIVATE|INTERFACE)\b", linked, maxsplit=1)
    for target in linked[1].split() if len(linked) == 2 else []:
        problem = problem_of(folder, target)
        if problem:
            result.problems.append(f"{name}: {problem}")


def run(tree):
    result = Result()
    folders_with_code = {folder_of(f) for f in tree.select((".cc",), ("server/", "kernels/", "client/cpp"))}
    folders_with_code -= {"server", None}
    for folder in sorted(folders_with_code):
        name = f"{folder}/CMakeLists.txt"
        if not tree.has(name):
            result.problems.append(f"{folder}: has code but no CMakeLists.txt")
            continue
        text = re.sub(r"^\s*#.*", "", tree.read(name), flags=re.M)
        libraries = LIBRARY.findall(text)
        if len(libraries) != 1 or folder_of_target(libraries[0][0]) != folder:
            found = ", ".join(library for library, _ in libraries) or "none"
            result.problems.append(f"{name}: one spectrumkv_library named after the folder expected, found: {found}")
        for _, arguments in libraries + OTHER_LINK.findall(text):
            check_links(name, folder, arguments, result)
    result.reports.append(f"{len(folders_with_code)} folders, one static library each")
    return result
