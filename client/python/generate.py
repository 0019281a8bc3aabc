"""Makes src/spectrumkv/v1 (messages and stubs) from proto/spectrumkv/v1. Run by the build; by hand: python generate.py"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE / "src"
PROTO = HERE.parents[1] / "proto"


def generate() -> None:
    """Does nothing in a source distribution, which carries the generated files and no proto folder."""
    target = SOURCE / "spectrumkv" / "v1"
    protos = sorted((PROTO / "spectrumkv" / "v1").glob("*.proto"))
    if not protos:
        if (target / "worker_service_pb2.py").exists():
            return
        sys.exit(f"generate.py: no protos in {PROTO} and nothing generated in {target}")
    from grpc_tools import protoc

    target.mkdir(exist_ok=True)
    arguments = ["protoc", f"-I{PROTO}", f"--python_out={SOURCE}", f"--pyi_out={SOURCE}", f"--grpc_python_out={SOURCE}"]
    if protoc.main(arguments + [str(proto) for proto in protos]) != 0:
        sys.exit("generate.py: protoc failed")
    (target / "__init__.py").write_text('"""Generated from proto/spectrumkv/v1."""\n')


if __name__ == "__main__":
    generate()
