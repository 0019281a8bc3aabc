// What commands print: tables and "key: value" lines for people, JSON for programs.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <google/protobuf/message.h>

#include "spectrumkv/v1/report.pb.h"

namespace spectrumkv::ctl {

// Pretty JSON with the field names of the proto, fields of value 0 included.
std::string ToJson(const google::protobuf::Message& message);
// The same in one line.
std::string ToJsonLine(const google::protobuf::Message& message);

// Columns as wide as their widest cell; the first row is the head.
std::string Table(const std::vector<std::vector<std::string>>& rows);
// One aligned line each; empty values are left out.
std::string Lines(const std::vector<std::pair<std::string, std::string>>& lines);

// "1.5 MiB", "17 B".
std::string Bytes(uint64_t bytes);
// "1.23 s", "45.6 ms", "789 us".
std::string Seconds(double seconds);
// `digits` after the point.
std::string Real(double value, int digits);
std::string Percent(double share);
// "118.2 MiB/s".
std::string Rate(double bytes_per_second);
// "link", ...; empty for UNSPECIFIED.
std::string LimitName(v1::LimitedBy limit);
// A budget that the daemon chose, and why.
std::string Choice(const v1::BudgetChoice& choice);
// "COMMITTED" of TRANSFER_STATE_COMMITTED, given the prefix.
std::string Short(const std::string& name, const std::string& prefix);

std::string StateName(v1::TransferState state);
std::string RoleName(v1::TransferRole role);
// "RAW 120/120, Q4 500/500": tokens of K / of V.
std::string Tiers(const google::protobuf::RepeatedPtrField<v1::TierCount>& tiers);
std::string ReportLines(const v1::TransferReport& report);

}  // namespace spectrumkv::ctl
