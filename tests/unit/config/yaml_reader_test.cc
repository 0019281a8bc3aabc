#include "server/config/yaml_reader.h"

#include <gtest/gtest.h>

#include <string>

namespace spectrumkv {
namespace {

// "" if it is read, else line:column: message.
std::string Refusal(const std::string& text) {
  YamlNode root;
  YamlError error;
  if (ReadYaml(text, &root, &error)) return "";
  return std::to_string(error.line) + ":" + std::to_string(error.column) + ": " + error.message;
}

TEST(YamlReaderTest, KeepsPlacesAndDuplicates) {
  YamlNode root;
  YamlError error;
  ASSERT_TRUE(ReadYaml("a: 1\nb:\n  - x\n  - 'y'\na: 2\n", &root, &error)) << error.message;
  ASSERT_EQ(root.kind, YamlNode::Kind::kMap);
  ASSERT_EQ(root.children.size(), 6u);
  EXPECT_EQ(root.children[1].scalar, "1");
  EXPECT_EQ(root.children[1].line, 1);
  EXPECT_EQ(root.children[1].column, 4);
  const YamlNode& list = root.children[3];
  ASSERT_EQ(list.kind, YamlNode::Kind::kList);
  ASSERT_EQ(list.children.size(), 2u);
  EXPECT_EQ(list.children[1].scalar, "y");
  EXPECT_EQ(list.children[1].line, 4);
  EXPECT_EQ(list.children[1].column, 5);
  EXPECT_EQ(root.children[4].scalar, "a");
  EXPECT_EQ(root.children[4].line, 5);
}

TEST(YamlReaderTest, EmptyIsNull) {
  for (const char* text : {"", "\n\n", "# only a comment\n", "---\n", "---\n...\n", "~\n"}) {
    YamlNode root;
    YamlError error;
    EXPECT_TRUE(ReadYaml(text, &root, &error)) << text;
    EXPECT_EQ(root.kind, YamlNode::Kind::kNull) << text;
  }
}

TEST(YamlReaderTest, RefusesWhatCanGrow) {
  EXPECT_EQ(Refusal("a: &x 1\nb: *x\n"), "1:4: anchors are not supported");
  EXPECT_EQ(Refusal("a: &x {b: 1}\n"), "1:4: anchors are not supported");
  EXPECT_EQ(Refusal("a: 1\n---\nb: 2\n").substr(0, 20), "2:1: a second docume");
  EXPECT_EQ(Refusal("a: !!int 1\n"), "1:4: tags are not supported");
  EXPECT_EQ(Refusal("a: !custom {b: 1}\n"), "1:4: tags are not supported");
  EXPECT_EQ(Refusal("[[[[[[[[1]]]]]]]]"), "");
  EXPECT_EQ(Refusal("[[[[[[[[[1]]]]]]]]]"), "1:9: nested deeper than 8 levels");
  EXPECT_EQ(Refusal(std::string(100000, '[')).find("nested deeper than 8 levels"), 5u);
}

TEST(YamlReaderTest, CountsNodes) {
  std::string list = "[1";
  for (int i = 1; i < 9999; ++i) list += ",1";
  EXPECT_EQ(Refusal(list + "]"), "");  // 9999 and the list
  EXPECT_NE(Refusal(list + ",1]").find("more than 10000 values"), std::string::npos);
}

TEST(YamlReaderTest, RefusesWhatIsNotText) {
  EXPECT_EQ(Refusal(std::string("a: 1\nb\0", 7)), "2:2: not a text file: byte 0");
  EXPECT_EQ(Refusal("a: \x7f"), "1:4: not a text file: byte 127");
  EXPECT_EQ(Refusal("\xff\xfe"
                    "a"),
            "1:1: not a text file: byte 255");
  EXPECT_EQ(Refusal("a: \"\xc3\xa4\"\n"), "");
}

TEST(YamlReaderTest, SyntaxErrorsHaveTheirPlace) {
  EXPECT_EQ(Refusal("a: b: c\n"), "1:5: not valid YAML: illegal map value");
  EXPECT_EQ(Refusal("a: [1, 2\nb: 3\n").substr(0, 2), "2:");
  EXPECT_NE(Refusal("a: {b: 1\n"), "");
  EXPECT_NE(Refusal("*unknown\n"), "");
}

}  // namespace
}  // namespace spectrumkv
