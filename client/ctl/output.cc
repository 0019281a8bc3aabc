#include "client/ctl/output.h"

#include <algorithm>
#include <cctype>
#include <cstdio>

#include <google/protobuf/util/json_util.h>

namespace spectrumkv::ctl {

namespace {

std::string Json(const google::protobuf::Message& message, bool whitespace) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = whitespace;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  if (!google::protobuf::util::MessageToJsonString(message, &json, options).ok()) return "{}\n";
  return whitespace ? json : json + "\n";
}

// Names are their workers' own, and may be another user's: none moves the cursor of a terminal.
std::string Shown(std::string text) {
  for (char& c : text) {
    if (std::iscntrl(static_cast<unsigned char>(c)) != 0) c = '?';
  }
  return text;
}

}  // namespace

std::string ToJson(const google::protobuf::Message& message) { return Json(message, true); }
std::string ToJsonLine(const google::protobuf::Message& message) { return Json(message, false); }

std::string Table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      text += Shown(row[i]);
      if (i + 1 < row.size()) text += std::string(widths[i] - row[i].size() + 2, ' ');
    }
    text += '\n';
  }
  return text;
}

std::string Lines(const std::vector<std::pair<std::string, std::string>>& lines) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& [key, value] : lines) {
    if (!value.empty()) rows.push_back({key + ":", value});
  }
  return Table(rows);
}

std::string Real(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

std::string Bytes(uint64_t bytes) {
  static const char* const kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) return std::to_string(bytes) + " B";
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return Real(value, value < 10 ? 2 : 1) + " " + kUnits[unit];
}

std::string Seconds(double seconds) {
  if (seconds >= 1) return Real(seconds, 2) + " s";
  if (seconds >= 1e-3) return Real(seconds * 1e3, 1) + " ms";
  return Real(seconds * 1e6, 0) + " us";
}

std::string Percent(double share) { return Real(share * 100, 1) + " %"; }

std::string Rate(double bytes_per_second) { return Bytes(static_cast<uint64_t>(bytes_per_second)) + "/s"; }

std::string LimitName(v1::LimitedBy limit) {
  if (limit == v1::LIMITED_BY_UNSPECIFIED || !v1::LimitedBy_IsValid(limit)) return "";
  std::string name = Short(v1::LimitedBy_Name(limit), "LIMITED_BY_");
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

std::string Choice(const v1::BudgetChoice& choice) {
  const std::string reason = v1::BudgetReason_IsValid(choice.reason())
                                 ? Short(v1::BudgetReason_Name(choice.reason()), "BUDGET_REASON_")
                                 : std::to_string(choice.reason());
  std::string text = Real(choice.budget(), 2) + ", " + reason + " of " + Seconds(choice.target_seconds());
  if (choice.has_predicted_seconds()) text += ", predicted " + Seconds(choice.predicted_seconds());
  if (choice.has_link_bytes_per_second()) text += " at " + Rate(choice.link_bytes_per_second());
  return text;
}

std::string Short(const std::string& name, const std::string& prefix) {
  return name.compare(0, prefix.size(), prefix) == 0 ? name.substr(prefix.size()) : name;
}

std::string StateName(v1::TransferState state) { return Short(v1::TransferState_Name(state), "TRANSFER_STATE_"); }
std::string RoleName(v1::TransferRole role) {
  return role == v1::TRANSFER_ROLE_SENDER ? "sender" : role == v1::TRANSFER_ROLE_RECEIVER ? "receiver" : "";
}

std::string Tiers(const google::protobuf::RepeatedPtrField<v1::TierCount>& tiers) {
  std::string text;
  for (const v1::TierCount& count : tiers) {
    text += (text.empty() ? "" : ", ") + Short(v1::Tier_Name(count.tier()), "TIER_") + " " +
            std::to_string(count.k_tokens()) + "/" + std::to_string(count.v_tokens());
  }
  return text;
}

std::string ReportLines(const v1::TransferReport& r) {
  const double kv_bytes = static_cast<double>(r.kv_bytes());
  std::string stages;
  for (const v1::StageTime& stage : r.stages()) {
    stages += (stages.empty() ? "" : ", ") + stage.stage() + " " + Seconds(stage.seconds());
  }
  std::string parts;
  for (const v1::TransferReport& part : r.parts()) {
    parts += (parts.empty() ? "" : ", ") + std::to_string(part.part().index()) + " of " +
             std::to_string(part.part().count()) + " " + StateName(part.state()) + " " + Bytes(part.wire_bytes());
  }
  const std::string limit = LimitName(r.limited_by());
  const auto count = [](uint64_t n) { return n == 0 ? std::string() : std::to_string(n); };
  return Lines({
      {"transfer", r.transfer_id()},
      {"role", RoleName(r.role())},
      {"state", StateName(r.state())},
      {"reason", r.reason()},
      {"message", r.message()},
      {"tokens", std::to_string(r.tokens()) + (r.kept_tokens() < r.tokens() && r.kept_tokens() > 0
                                                   ? " (" + std::to_string(r.kept_tokens()) + " kept)"
                                                   : "")},
      {"KV bytes", Bytes(r.kv_bytes())},
      {"wire bytes",
       Bytes(r.wire_bytes()) +
           (r.kv_bytes() > 0 ? " (" + Percent(static_cast<double>(r.wire_bytes()) / kv_bytes) + ")" : "")},
      {"saved", Bytes(r.saved_bytes())},
      {"retained for", r.retained_seconds() > 0 ? Seconds(r.retained_seconds()) : ""},
      {"refined by", r.refined_wire_bytes() > 0 ? Bytes(r.refined_wire_bytes()) + " more" : ""},
      {"exact", r.exact() ? "yes" : ""},
      {"refines", r.refines()},
      {"cells", count(r.cells())},
      {"cells left", count(r.cells_left())},
      {"staged", r.staged_bytes() > 0 ? Bytes(r.staged_bytes()) : ""},
      {"applied", r.applied_bytes() > 0 ? Bytes(r.applied_bytes()) : ""},
      {"stale cells", count(r.stale_cells())},
      {"bits per value", r.bits_per_value() > 0 ? Real(r.bits_per_value(), 2) : ""},
      {"escape overrun", r.escape_overrun_bytes() > 0 ? Bytes(r.escape_overrun_bytes()) : ""},
      {"tiers (K/V)", Tiers(r.tiers())},
      {"chunks", std::to_string(r.chunks())},
      {"resent", count(r.chunks_resent())},
      {"duplicate", count(r.chunks_duplicate())},
      {"non-finite", count(r.nonfinite_values())},
      {"rounded words", count(r.rounded_words())},
      {"backend", r.backend()},
      {"path", r.path()},
      {"source guard", r.source_guard()},
      {"attempts", count(r.attempts())},
      {"streams", count(r.streams())},
      {"first layer", r.first_layer_ready_seconds() > 0 ? Seconds(r.first_layer_ready_seconds()) : ""},
      {"duration", Seconds(r.duration_seconds())},
      {"limited by", limit.empty() ? "" : limit + " (" + Seconds(r.limited_seconds()) + ")"},
      {"link", r.has_measured_link_bytes_per_second() ? Rate(r.measured_link_bytes_per_second()) + " (this transfer)" : ""},
      {"link known", r.has_link_bytes_per_second() ? Rate(r.link_bytes_per_second()) : ""},
      {"budget choice", r.has_budget_choice() ? Choice(r.budget_choice()) : ""},
      {"stages", stages},
      {"parts", parts},
  });
}

}  // namespace spectrumkv::ctl
