// Structured logging to stderr, one line per event:
//
//   2026-11-29T18:20:31.004512Z info transfer committed transfer=ab12 wire_bytes=73114
//
//   SPECTRUMKV_LOG(kInfo, "transfer", "committed", {"transfer", id}, {"wire_bytes", bytes});
//
// The arguments are evaluated only if the level is on. Text from outside is escaped: an event is always one line.
// Never log per chunk, and never log tokens, keys or KV bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "absl/status/status.h"

namespace spectrumkv {

enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };
enum class LogFormat { kText, kJson };

// "debug", "info", "warning", "error"; "text", "json". InvalidArgument names the value and what is allowed.
absl::Status SetLogLevel(const std::string& name);
absl::Status SetLogFormat(const std::string& name);
std::string GetLogLevel();

// One relaxed load. Thread-safe, as everything here.
bool LogEnabled(LogLevel level);

struct LogField {
  LogField(const char* k, const std::string& v) : key(k), value(v), is_text(true) {}
  LogField(const char* k, const char* v) : key(k), value(v), is_text(true) {}
  LogField(const char* k, bool v) : key(k), value(v ? "true" : "false") {}
  template <typename T, std::enable_if_t<std::is_arithmetic_v<T> && !std::is_same_v<T, bool>, int> = 0>
  LogField(const char* k, T v) : key(k), value(NumberText(v)), is_text(!IsFinite(v)) {}

  const char* key;
  std::string value;
  bool is_text = false;

 private:
  template <typename T>
  static std::string NumberText(T v) {
    if constexpr (std::is_floating_point_v<T>)
      return DoubleText(v);
    else
      return std::to_string(v);
  }
  template <typename T>
  static bool IsFinite(T v) {
    return v - v == 0;
  }  // JSON has no NaN and no infinity
  static std::string DoubleText(double v);
};

// Writes the event whatever the level; use the macro. Values are cut after 4 KiB.
void LogEvent(LogLevel level, const char* module, const std::string& message, std::initializer_list<LogField> fields);

// Takes the lines (without newline) instead of stderr; nullptr: stderr again.
void SetLogSinkForTest(std::function<void(const std::string& line)> sink);

}  // namespace spectrumkv

#define SPECTRUMKV_LOG(level, module, message, ...)                                          \
  do {                                                                                       \
    if (::spectrumkv::LogEnabled(::spectrumkv::LogLevel::level)) {                           \
      ::spectrumkv::LogEvent(::spectrumkv::LogLevel::level, module, message, {__VA_ARGS__}); \
    }                                                                                        \
  } while (false)
