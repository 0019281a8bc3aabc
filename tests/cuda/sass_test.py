"""What ptxas made of the kernels, read from the fat binary: no spills, few registers, 128-bit accesses on the data path.

usage: sass_test.py LIBRARY ARCHITECTURE...
"""

import os
import re
import shutil
import subprocess
import sys

# Registers a thread: what kBlocksPerMultiprocessor (kernels/cuda/tuning.h) blocks of 128 threads leave to each.
MOST_REGISTERS = 80
# (load, store) of 16 bytes, by kernel: what must be there for each set of values that a lane holds.
WIDE = {"Classify": (1, 0), "Centre": (1, 0), "Encode": (1, 1), "Decode": (0, 1), "Scan": (1, 0), "Spread": (1, 0), "Attend": (1, 0), "Zero": (0, 1)}
KERNELS = {"Classify": 3, "Layout": 2, "Centre": 9, "Encode": 9, "Decode": 9, "Scan": 3, "Spread": 3,
           "Attend": 3, "AttendFactors": 1, "AttendFold": 1, "Zero": 3}

NAME = re.compile(r"_ZN10spectrumkv3gpu\d+([A-Za-z]+)I(?:LNS_5DTypeE(\d)E)?(?:Li(\d)E)?")
USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def find_tool(name):
    """On PATH, or where the PyPI package puts it."""
    found = shutil.which(name)
    for folder in () if found else sys.path:
        for sub in ("nvidia/cu13/bin", "nvidia/cu12/bin", "nvidia/cuda_" + name + "/bin"):
            path = os.path.join(folder, sub, name)
            if os.access(path, os.X_OK):
                return path
    return found


def run(tool, *arguments):
    environment = dict(os.environ, PATH=os.path.dirname(find_tool("nvdisasm")) + os.pathsep + os.environ["PATH"])
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True, env=environment).stdout


def name_of(mangled):
    match = NAME.match(mangled)
    return (match.group(1), match.group(2) or "", int(match.group(3) or 1)) if match else (mangled, "", 1)


def check_usage(text, architecture, problems):
    counts, most = {}, 0
    for mangled, registers, stack, _, local in USAGE.findall(text):
        kernel, dtype, sets = name_of(mangled)
        counts[kernel] = counts.get(kernel, 0) + 1
        most = max(most, int(registers))
        where = f"sm_{architecture} {kernel}<{dtype}, {sets}>"
        if int(registers) > MOST_REGISTERS:
            problems.append(f"{where}: {registers} registers, the limit is {MOST_REGISTERS}")
        if int(stack) or int(local):
            problems.append(f"{where}: spills or local memory (stack {stack}, local {local})")
    if counts != KERNELS:
        problems.append(f"sm_{architecture}: kernels {counts}, expected {KERNELS}")
    return most


def check_accesses(text, architecture, problems):
    """Loads and stores of 16 bytes in each kernel, and none that does not know its memory to be global."""
    for part in text.split("Function : ")[1:]:
        kernel, dtype, sets = name_of(part.split(None, 1)[0])
        where = f"sm_{architecture} {kernel}<{dtype}, {sets}>"
        loads = len(re.findall(r"\bLDG\.E[\w.]*\.128\b", part))
        stores = len(re.findall(r"\bSTG\.E[\w.]*\.128\b", part))
        scale = sets * (2 if dtype == "3" else 1)  # float32: two for eight values
        for what, found, wanted in zip(("load", "store"), (loads, stores), WIDE.get(kernel, (0, 0))):
            if found < wanted * scale:
                problems.append(f"{where}: {found} 128-bit {what}s, expected {wanted * scale}")
        if kernel == "Decode" and loads == 0:  # of RAW words, set by set
            problems.append(f"{where}: no 128-bit load")
        if kernel in WIDE and re.search(r"\b(?:LD|ST)\.E\b", part):
            problems.append(f"{where}: generic accesses")


def main():
    library, architectures = sys.argv[1], sys.argv[2:]
    cuobjdump = find_tool("cuobjdump")
    if not cuobjdump or not find_tool("nvdisasm"):
        print("SKIPPED: no cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)")
        return 77
    problems = []
    for architecture in architectures:
        most = check_usage(run(cuobjdump, "-res-usage", "-arch", "sm_" + architecture, library), architecture, problems)
        check_accesses(run(cuobjdump, "-sass", "-arch", "sm_" + architecture, library), architecture, problems)
        print(f"sm_{architecture}: at most {most} registers")
    for problem in problems:
        print("FAILED:", problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
