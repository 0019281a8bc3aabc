// The interpreter's instructions at their edges, against the PTX manual; and what it refuses.
#include <gtest/gtest.h>

#include <bit>
#include <limits>

#include "tests/cuda/ptx/alu.h"
#include "tests/cuda/ptx/decode_words.h"
#include "tests/cuda/ptx/parser.h"

namespace spectrumkv::ptx {
namespace {

constexpr uint64_t kNan = 0x7FC00001, kCanonical = 0x7FFFFFFF, kInf = 0x7F800000;

uint64_t Bits(float x) { return std::bit_cast<uint32_t>(x); }

uint64_t Of(const std::string& words, std::vector<uint64_t> in) {
  Instruction i = DecodeWords(words, words);
  i.ins.resize(in.size());
  return Evaluate(i, in.data());
}

TEST(PtxAluTest, Integers) {
  EXPECT_EQ(Of("add.s32", {0x7FFFFFFF, 1}), 0xFFFFFFFF80000000u);
  EXPECT_EQ(Of("add.u32", {0xFFFFFFFF, 1}), 0u);
  EXPECT_EQ(Of("sub.s64", {0, 1}), ~uint64_t{0});
  EXPECT_EQ(Of("mul.lo.s32", {0x10000, 0x10000}), 0u);
  EXPECT_EQ(Of("mul.hi.u32", {0xFFFFFFFF, 0xFFFFFFFF}), 0xFFFFFFFEu);
  EXPECT_EQ(Of("mul.hi.s32", {0xFFFFFFFF, 2}), ~uint64_t{0});
  EXPECT_EQ(Of("mul.wide.u16", {0xFFFF, 0xFFFF}), 0xFFFE0001u);
  EXPECT_EQ(Of("mul.wide.s32", {0xFFFFFFFF, 3}), ~uint64_t{0} - 2);
  EXPECT_EQ(Of("mad.lo.s32", {3, 4, 0xFFFFFFFF}), 11u);
  EXPECT_EQ(Of("div.u32", {0xFFFFFFFF, 2}), 0x7FFFFFFFu);
  EXPECT_EQ(Of("div.s32", {0xFFFFFFFF, 2}), 0u);
  EXPECT_EQ(Of("rem.u32", {10, 4}), 2u);
  EXPECT_THROW(Of("div.u32", {1, 0}), Fault);
  EXPECT_EQ(Of("min.s32", {0xFFFFFFFF, 1}), ~uint64_t{0});
  EXPECT_EQ(Of("min.u32", {0xFFFFFFFF, 1}), 1u);
  EXPECT_EQ(Of("max.u32", {0xFFFFFFFF, 1}), 0xFFFFFFFFu);
  EXPECT_EQ(Of("not.pred", {1}), 0u);
  EXPECT_EQ(Of("not.b32", {0}), 0xFFFFFFFFu);
  EXPECT_EQ(Of("popc.b32", {0xF0F0}), 8u);
  EXPECT_EQ(Of("clz.b32", {1}), 31u);
  EXPECT_EQ(Of("brev.b32", {1}), 0x80000000u);
}

TEST(PtxAluTest, ShiftsAndFields) {
  EXPECT_EQ(Of("shl.b32", {1, 31}), 0x80000000u);
  EXPECT_EQ(Of("shl.b32", {1, 32}), 0u);
  EXPECT_EQ(Of("shr.u32", {0x80000000, 31}), 1u);
  EXPECT_EQ(Of("shr.u32", {0x80000000, 32}), 0u);
  EXPECT_EQ(Of("shr.s32", {0x80000000, 40}), ~uint64_t{0});
  EXPECT_EQ(Of("prmt.b32", {0x33221100, 0x77665544, 0x7531}), 0x77553311u);
  EXPECT_EQ(Of("prmt.b32", {0x80, 0, 0x8888}), 0xFFFFFFFFu);
  EXPECT_EQ(Of("bfe.u32", {0xABCD1234, 8, 8}), 0x12u);
  EXPECT_EQ(Of("bfi.b32", {0xFF, 0, 28, 8}), 0xF0000000u);
  EXPECT_EQ(Of("bfi.b32", {0xFF, 5, 32, 8}), 5u);
  EXPECT_EQ(Of("lop3.b32", {0xC, 0xA, 0xF, 0x80}), 0x8u);
  EXPECT_EQ(Of("shf.l.wrap.b32", {0x80000000, 1, 33}), 3u);
  EXPECT_EQ(Of("shf.r.clamp.b32", {7, 9, 40}), 9u);
}

TEST(PtxAluTest, Floats) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(Of("add.rn.f32", {Bits(16777216.0f), Bits(1.0f)}), Bits(16777216.0f));
  EXPECT_EQ(Of("mul.rn.f32", {Bits(tiny), Bits(0.5f)}), 0u);
  EXPECT_EQ(Of("mul.rn.f32", {Bits(tiny), Bits(1.0f)}), 1u) << "subnormals are not flushed";
  EXPECT_EQ(Of("sub.rn.f32", {kInf, kInf}), kCanonical);
  EXPECT_EQ(Of("div.rn.f32", {Bits(1.0f), 0}), kInf);
  EXPECT_EQ(Of("rcp.rn.f32", {Bits(3.0f)}), Bits(1.0f / 3.0f));
  EXPECT_EQ(Of("fma.rn.f32", {Bits(1.0f + 0x1p-23f), Bits(1.0f - 0x1p-23f), Bits(-1.0f)}), Bits(-0x1p-46f));
  EXPECT_EQ(Of("max.f32", {kNan, Bits(1.0f)}), Bits(1.0f));
  EXPECT_EQ(Of("max.f32", {Bits(-0.0f), Bits(0.0f)}), Bits(0.0f));
  EXPECT_EQ(Of("min.f32", {Bits(0.0f), Bits(-0.0f)}), Bits(-0.0f));
  EXPECT_EQ(Of("neg.f32", {kNan}), kNan | 0x80000000);
  EXPECT_EQ(Of("abs.f32", {Bits(-2.0f)}), Bits(2.0f));
}

TEST(PtxAluTest, Conversions) {
  EXPECT_EQ(Of("cvt.rzi.s32.f32", {Bits(-1.9f)}), ~uint64_t{0});
  EXPECT_EQ(Of("cvt.rni.s32.f32", {Bits(2.5f)}), 2u);
  EXPECT_EQ(Of("cvt.rmi.s32.f32", {Bits(-0.5f)}), ~uint64_t{0});
  EXPECT_EQ(Of("cvt.rzi.s32.f32", {Bits(3e9f)}), 0x7FFFFFFFu);
  EXPECT_EQ(Of("cvt.rzi.s32.f32", {kNan}), 0u);
  EXPECT_EQ(Of("cvt.rzi.u32.f32", {Bits(-1.0f)}), 0u);
  EXPECT_EQ(Of("cvt.rn.f32.s32", {0xFFFFFFFF}), Bits(-1.0f));
  EXPECT_EQ(Of("cvt.rn.f32.u32", {0xFFFFFFFF}), Bits(4294967296.0f));
  EXPECT_EQ(Of("cvt.rn.f32.u32", {16777217}), Bits(16777216.0f));
  EXPECT_EQ(Of("cvt.s32.s8", {0x80}), ~uint64_t{0x7F});
  EXPECT_EQ(Of("cvt.u32.u16", {0x1FFFF}), 0xFFFFu);
  EXPECT_EQ(Of("cvt.f32.f16", {0x3C00}), Bits(1.0f));
  EXPECT_EQ(Of("cvt.f32.f16", {1}), Bits(0x1p-24f));
  EXPECT_EQ(Of("cvt.rn.f16.f32", {Bits(65520.0f)}), 0x7C00u);
  EXPECT_EQ(Of("cvt.rn.f16.f32", {Bits(65519.0f)}), 0x7BFFu);
  EXPECT_EQ(Of("cvt.rn.bf16.f32", {0x3F808000}), 0x3F80u);
  EXPECT_EQ(Of("cvt.rn.bf16.f32", {0x3F818000}), 0x3F82u);
}

TEST(PtxAluTest, Comparisons) {
  EXPECT_EQ(Of("setp.lt.s32", {0xFFFFFFFF, 0}), 1u);
  EXPECT_EQ(Of("setp.lt.u32", {0xFFFFFFFF, 0}), 0u);
  EXPECT_EQ(Of("setp.hs.u32", {5, 5}), 1u);
  EXPECT_EQ(Of("setp.ne.f32", {kNan, kNan}), 0u);
  EXPECT_EQ(Of("setp.neu.f32", {kNan, kNan}), 1u);
  EXPECT_EQ(Of("setp.nan.f32", {kNan, 0}), 1u);
  EXPECT_EQ(Of("setp.num.f32", {0, 0}), 1u);
  EXPECT_EQ(Of("setp.eq.f32", {Bits(-0.0f), 0}), 1u);
  EXPECT_EQ(Of("setp.eq.and.s32", {1, 1, 0}), 0u);
  EXPECT_EQ(Of("setp.eq.or.s32", {1, 2, 1}), 1u);
  EXPECT_EQ(Of("selp.b32", {3, 4, 0}), 4u);
}

TEST(PtxAluTest, UnknownOrInexactIsRefusedByName) {
  const std::string refused[] = {"add.f32",         "mul.f32",      "div.approx.f32", "div.full.f32",
                                 "add.rn.ftz.f32",  "fma.rn.f64",   "ex2.approx.f32", "add.rz.f32",
                                 "wgmma.mma_async", "cp.async.ca",  "mul.f16x2",      "add.rn.f16",
                                 "cvt.rna.s32.f32", "prmt.b32.f4e", "tex.2d.v4.f32",  "ld.const.u32"};
  for (const std::string& words : refused) {
    try {
      DecodeWords(words, words + " %r1");
      ADD_FAILURE() << words << " was taken";
    } catch (const Fault& fault) {
      EXPECT_NE(std::string(fault.what()).find(words), std::string::npos) << fault.what();
    }
  }
}

TEST(PtxParserTest, ReadsWhatNvccWrites) {
  const Module module(R"(
.version 9.0
.target sm_90
.visible .entry one(.param .align 8 .b8 one_param_0[24])
.maxntid 128, 1, 1
{
  .reg .pred %p<2>;
  .reg .b32 %r<9>;
  .reg .b64 %rd<3>;
  .shared .align 16 .b8 _ZZ4oneE1s[40];
  ld.param.u64 %rd1, [one_param_0+16];
  {  cvt.rn.f16.f32 %rs245, %f179;}
  mov.b64 {%r1, %r2}, %rd1;
  shfl.sync.bfly.b32 %r3|%p1, %r1, %r2, 31, -1;
$L__BB0_1:
  @!%p1 bra $L__BB0_1;
  st.shared.v2.u32 [_ZZ4oneE1s+8], {%r1, %r2};
  ret;
}
)");
  const Kernel& kernel = module.Find("one");
  EXPECT_EQ(kernel.param_bytes, 24);
  EXPECT_EQ(kernel.shared_bytes, 40);
  ASSERT_EQ(kernel.code.size(), 7u);
  EXPECT_EQ(kernel.code[0].ins[0].value, 16u);
  EXPECT_EQ(kernel.code[1].op, Opcode::kRefused) << "registers that were never declared";
  EXPECT_EQ(kernel.code[2].outs.size(), 2u);
  EXPECT_GE(kernel.code[3].predicate_out, 0);
  EXPECT_EQ(kernel.code[4].target, 4);
  EXPECT_TRUE(kernel.code[4].guard_negated);
  EXPECT_EQ(kernel.code[5].ins.size(), 3u);
  EXPECT_EQ(module.Refused().size(), 1u);
  EXPECT_THROW(module.Find("two"), Fault);
  EXPECT_THROW(Module(".visible .entry two() { ret;"), Fault);
  EXPECT_THROW(Module(".visible .entry two() { bra nowhere; }"), Fault);
}

}  // namespace
}  // namespace spectrumkv::ptx
