"""Each check finds a seeded violation, and lets the like of it that is allowed pass."""

import os
import shutil
import tempfile
import unittest

import check_documented
import check_format
import check_include_law
import check_link_law
import check_proto
import check_shell
import check_sizes
import check_skips
import check_words
from cpp_functions import functions
from tree import Tree

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class TidyTest(unittest.TestCase):
    def tree(self, files):
        """A checkout without git that holds these files."""
        folder = tempfile.mkdtemp(prefix="tidy_test.")
        self.addCleanup(shutil.rmtree, folder)
        for name, text in files.items():
            os.makedirs(os.path.dirname(os.path.join(folder, name)) or folder, exist_ok=True)
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)
        return Tree(folder)

    def problems(self, check, files):
        return check.run(self.tree(files)).problems

    def assert_one(self, check, files, *words):
        problems = self.problems(check, files)
        self.assertEqual(len(problems), 1, problems)
        for word in words:
            self.assertIn(word, problems[0])

    def test_include_law(self):
        cases = {
            "encode and decode": ("server/encode/a.cc", "server/decode/decode.h", "server/encode must not depend"),
            "a stage on transfer": ("server/pool/a.cc", "server/transfer/report.h", "server/pool must not depend"),
            "stream on tiers": ("server/stream/a.cc", "kernels/format/types.h", "kernels/format"),
            "kernels on gRPC": ("kernels/cpu/a.cc", "grpcpp/grpcpp.h", "must not use grpc"),
            "kernels on Abseil": ("kernels/format/a.h", "absl/status/status.h", "must not use absl"),
            "cpu on cuda": ("kernels/cpu/a.cc", "kernels/cuda/encode.h", "must not depend on kernels/cuda"),
            "yaml away from config": ("server/metrics/a.cc", "yaml-cpp/yaml.h", "must not use yaml"),
            "pool on the wire": ("server/pool/a.cc", "spectrumkv/v1/schema.pb.h", "must not use proto"),
            "plan on clocks": ("server/plan/a.cc", "chrono", "<chrono>"),
            "client on server": ("client/cpp/a.cc", "server/base/status.h", "must not depend on server/base"),
            "product on tests": ("server/base/a.cc", "tests/unit/base/fake_clock.h", "never includes from tests"),
            "an installed header on Abseil": ("client/sdk/spectrumkv/a.h", "absl/status/status.h", "must not use absl"),
            "an example on what is not installed": ("client/examples/cpp/a.cc", "client/cpp/client.h", "client/cpp"),
            "server on the client": ("server/base/a.cc", "spectrumkv/client.h", "depend on client/sdk/spectrumkv"),
            "an unknown folder": ("server/new/a.cc", "vector", "not in tests/tidy/law.py"),
            "an unknown target": ("server/base/a.cc", "client/new/a.h", "no folder of tests/tidy/law.py"),
        }
        for title, (name, header, words) in cases.items():
            with self.subTest(title):
                self.assert_one(check_include_law, {name: f'// x\n#include "{header}"\n'}, words, name)

    def test_kernels_are_cpp(self):
        for words in ("kernel<<<1, 32>>>(args);", 'asm("bar.sync 0;");', "namespace cg = cooperative_groups;"):
            with self.subTest(words):
                self.assert_one(check_include_law, {"kernels/cuda/a.cuh": words}, "kernels/cuda/a.cuh:1", "kernels must not use")
                self.assertEqual(self.problems(check_include_law, {"kernels/cuda/a.cu": words}), [])

    def test_include_law_allows(self):
        text = '#include <chrono>\n#include "absl/status/status.h"\n#include "server/base/clock.h"\n'
        self.assertEqual(self.problems(check_include_law, {"server/pool/a.cc": text}), [])

    def test_link_law(self):
        code = {"server/pool/a.cc": "", "server/pool/CMakeLists.txt": ""}
        cases = {
            "no library": ("", "found: none"),
            "twice": ("spectrumkv_library(spectrumkv_pool SOURCES a.cc)\n"
                      "spectrumkv_library(spectrumkv_pool SOURCES b.cc)", "spectrumkv_library(spectrumkv_pool ...)"),
            "another name": ("spectrumkv_library(spectrumkv_pool2 SOURCES a.cc)", "found: spectrumkv_pool2"),
            "another folder's": ("spectrumkv_library(spectrumkv_pool SOURCES a.cc)\n"
                                 "spectrumkv_library(spectrumkv_stream SOURCES a.cc)", "belongs to server/stream"),
            "unknown": ("spectrumkv_library(spectrumkv_pool SOURCES a.cc PRIVATE spectrumkv_x)", "no library of a folder"),
            "a part that links up": ("spectrumkv_library(spectrumkv_pool SOURCES a.cc)\n"
                                     "spectrumkv_library(spectrumkv_x SOURCES b.cc PUBLIC spectrumkv_scan)",
                                     "must not link spectrumkv_scan"),
            "links up": ("spectrumkv_library(spectrumkv_pool SOURCES a.cc\n  PRIVATE spectrumkv_transfer)",
                         "must not link spectrumkv_transfer"),
            "links gRPC": ("spectrumkv_library(spectrumkv_pool SOURCES a.cc PUBLIC gRPC::grpc++)", "(grpc)"),
            "later link": ("spectrumkv_library(spectrumkv_pool SOURCES a.cc)\n"
                           "target_link_libraries(spectrumkv_pool PRIVATE yaml-cpp)", "(yaml)"),
        }
        for title, (text, words) in cases.items():
            with self.subTest(title):
                self.assert_one(check_link_law, {**code, "server/pool/CMakeLists.txt": text}, words)
        good = "# spectrumkv_library(x)\nspectrumkv_library(spectrumkv_pool SOURCES a.cc PUBLIC spectrumkv_memory "
        good += "PRIVATE spectrumkv_pool_x)\nspectrumkv_library(spectrumkv_pool_x SOURCES b.cc PRIVATE absl::status)"
        self.assertEqual(self.problems(check_link_law, {**code, "server/pool/CMakeLists.txt": good}), [])
        self.assert_one(check_link_law, {"server/pool/a.cc": ""}, "no CMakeLists.txt")

    def test_sizes(self):
        self.assert_one(check_sizes, {"server/base/a.h": "\n" * 501}, "501 lines, the limit is 500")
        self.assertEqual(self.problems(check_sizes, {"server/base/a.h": "\n" * 500, "tests/a.cc": "\n" * 700}), [])
        self.assert_one(check_sizes, {"tests/a.cc": "\n" * 701}, "701 lines, the limit is 700")
        long_body = "void Long(int x) {\n" + "  x++;\n" * 99 + "}\n"
        self.assert_one(check_sizes, {"server/base/a.cc": long_body}, "Long has 101 lines")
        self.assertEqual(self.problems(check_sizes, {"tests/a.cc": long_body}), [])
        self.assert_one(check_sizes, {"client/python/a.py": "def long():\n" + "    pass\n" * 100}, "long has 101 lines")

    def test_cpp_functions(self):
        text = """namespace a {
class B {
 public:
  B() : x_{1}, y_(2) {
    Run();
  }
  int Get() const { return x_; }
};
// void Comment() {
int Free(const char* s = "{") {
  if (s) {
    auto f = [&](int i) { return i; };
  }
  return 1'000;
}
const int kTable[] = {
  1,
  2};
}  // namespace a
"""
        found = {name: lines for name, _, lines in functions(text)}
        self.assertEqual(found, {"B": 3, "Get": 1, "Free": 6})

    def test_documented(self):
        head = '// What this is for.\nsyntax = "proto3";\n'
        proto = "proto/spectrumkv/v1/a.proto"
        self.assert_one(check_documented, {proto: head + "service A {\n  rpc Do(DoRequest) returns (DoResponse);\n}"},
                        "rpc Do has no comment")
        self.assert_one(check_documented, {proto: head + "\nmessage Thing {}\n"}, "message Thing has no comment")
        self.assert_one(check_documented, {proto: head + "\nenum Kind {}\n"}, "enum Kind has no comment")
        self.assert_one(check_documented, {proto: 'syntax = "proto3";\n'}, "begins without a comment")
        good = head + "// Does.\nservice A {\n  // Does.\n  rpc Do(DoRequest) returns (DoResponse);\n}\nmessage DoRequest {}"
        self.assertEqual(self.problems(check_documented, {proto: good}), [])

        metrics = {"server/metrics/names.cc": '{"spectrumkv_chunks_total", 1}'}
        self.assert_one(check_documented, metrics, "docs/metrics.md is missing")
        self.assert_one(check_documented, {**metrics, "docs/metrics.md": "spectrumkv_chunks_total"}, "not documented")
        documented = "`spectrumkv_chunks_total{role}`"
        self.assertEqual(self.problems(check_documented, {**metrics, "docs/metrics.md": documented}), [])
        stale = {**metrics, "docs/metrics.md": documented + " `spectrumkv_gone_total`"}
        self.assert_one(check_documented, stale, "no metric `spectrumkv_gone_total`")

        keys = {"server/config/keys_peer.cc": '{"peer.streams", KeyKind::kCount}'}
        self.assert_one(check_documented, {**keys, "docs/configuration.md": "`peer.stream`"}, "`peer.streams`")
        self.assertEqual(self.problems(check_documented, {**keys, "docs/configuration.md": "`peer.streams`"}), [])

    def test_words(self):
        for text in ("see iss" + "ue 12", "fixes #" + "41.", "as Cl" + "aude wrote", "in th" + "is session",
                     "TO" + "DO: later", "cp ../sha" + "red/x", "/wo" + "rk/main"):
            with self.subTest(text):
                self.assert_one(check_words, {"docs/a.md": "one\n" + text}, "docs/a.md:2:")
        for text in ("a peer session", "#include <x>", "colour #123456", "page#12", "the issue with NaN", "&#39;"):
            with self.subTest(text):
                self.assertEqual(self.problems(check_words, {"docs/a.md": text}), [])

    def test_skips(self):
        by_words = 'set_tests_properties(a PROPERTIES SKIP_REGULAR_EXPRESSION "SKIPPED:")\n'
        for name in ("tests/a/CMakeLists.txt", "cmake/A.cmake"):
            self.assert_one(check_skips, {name: "# x\n" + by_words}, f"{name}:2:", "SKIP_RETURN_CODE")
        good = "set_tests_properties(a PROPERTIES SKIP_RETURN_CODE 77)\n"
        self.assertEqual(self.problems(check_skips, {"tests/a/CMakeLists.txt": good, "docs/a.md": by_words}), [])
        for status, problems in (("0", 1), ("1", 1), ("77", 0)):
            script = f'if true; then\n  echo "SKIPPED: no x"\n  exit {status}\nfi\n'
            found = self.problems(check_skips, {"tests/a/run.sh": script})
            self.assertEqual(len(found), problems, found)

    def test_shell(self):
        self.assert_one(check_shell, {"scripts/a": "#!/bin/bash\necho hi\n"}, "set -eu")
        good = "#!/usr/bin/env bash\nset -euo pipefail\necho hi\n"
        self.assertEqual(self.problems(check_shell, {"scripts/a": good, "scripts/b.py": "x"}), [])
        if not shutil.which("shellcheck"):
            self.skipTest("SKIPPED: shellcheck is not installed")
        self.assert_one(check_shell, {"scripts/a": good + "rm $(echo a)\n"}, "scripts/a:4")

    def test_proto(self):
        buf = check_proto.find_buf(ROOT)
        if not buf:
            self.skipTest("SKIPPED: buf is not installed")
        text = 'syntax = "proto3";\npackage a.v1;\nmessage A {\n  int32 x = 1;\n}\n'
        files = {"proto/buf.yaml": "version: v2\nmodules: [{path: .}]\n", "proto/a/v1/a.proto": text}
        tree = self.tree(files)
        self.link_buf(buf, tree)
        self.assertIn("is missing", check_proto.run(tree).problems[0])

        def with_set(changed):
            tree = self.tree(files)
            self.assertEqual(check_proto.run_buf(buf, tree, "build", ".", "-o", "spectrumkv.protoset#format=binpb"), [])
            with open(tree.path("proto/a/v1/a.proto"), "w", encoding="utf-8") as file:
                file.write(changed)
            self.link_buf(buf, tree)
            return check_proto.run(Tree(tree.root)).problems

        self.assertEqual(with_set(text), [])
        added = with_set(text.replace("x = 1;", "x = 1;\n  int32 y = 2;"))
        self.assertTrue(any("is stale" in line for line in added), added)
        removed = with_set(text.replace("  int32 x = 1;\n", ""))
        self.assertTrue(any(line.startswith("buf breaking") for line in removed), removed)
        renamed = with_set(text + "message lower {}\n")
        self.assertTrue(any(line.startswith("buf lint") for line in renamed), renamed)

    @staticmethod
    def link_buf(buf, tree):
        os.makedirs(tree.path(".venv/bin"))
        os.symlink(buf, tree.path(".venv/bin/buf"))

    def test_format(self):
        if not shutil.which("clang-format"):
            self.skipTest("SKIPPED: clang-format is not installed")
        files = {".clang-format": "BasedOnStyle: Google\n", "server/base/a.cc": "int  x ;\n", "server/base/b.cc": "int y;\n"}
        reports = check_format.run(self.tree(files)).reports
        self.assertEqual(reports, ["1 of 2 files are as clang-format writes them", "  differs: server/base/a.cc"])


if __name__ == "__main__":
    unittest.main()
