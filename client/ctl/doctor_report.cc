// Findings as people and programs read them.
#include <google/protobuf/struct.pb.h>

#include "client/ctl/doctor.h"
#include "client/ctl/output.h"

namespace spectrumkv::ctl {

const char* LevelName(Finding::Level level) {
  static const char* const kNames[] = {"ok", "unknown", "warning", "problem"};
  return kNames[static_cast<size_t>(level)];
}

std::string DoctorText(const std::vector<Finding>& findings) {
  size_t check = 0;
  for (const Finding& f : findings) check = std::max(check, f.check.size());
  const std::string margin(check + 11, ' ');
  std::string text;
  for (const Finding& f : findings) {
    const std::string level = LevelName(f.level);
    text += level + std::string(9 - level.size(), ' ') + f.check + std::string(check + 2 - f.check.size(), ' ') +
            (f.subject.empty() ? "" : f.subject + ": ") + f.what + "\n";
    if (!f.advice.empty()) text += margin + "-> " + f.advice + "\n";
  }
  return text;
}

std::string DoctorJson(const std::vector<Finding>& findings) {
  google::protobuf::Struct out;
  auto* const list = (*out.mutable_fields())["findings"].mutable_list_value();
  for (const Finding& f : findings) {
    auto& fields = *list->add_values()->mutable_struct_value()->mutable_fields();
    fields["check"].set_string_value(f.check);
    fields["subject"].set_string_value(f.subject);
    fields["level"].set_string_value(LevelName(f.level));
    fields["what"].set_string_value(f.what);
    fields["advice"].set_string_value(f.advice);
  }
  return ToJson(out);
}

}  // namespace spectrumkv::ctl
