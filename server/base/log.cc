#include "server/base/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <mutex>
#include <utility>

#include "server/base/status.h"

namespace spectrumkv {
namespace {

constexpr size_t kMaxValueBytes = 4096;
constexpr const char* kLevelNames[] = {"debug", "info", "warning", "error"};

std::atomic<int> g_level{static_cast<int>(LogLevel::kInfo)};
std::atomic<bool> g_json{false};

std::mutex& SinkMutex() {
  static std::mutex* const mutex = new std::mutex;  // never destroyed: threads may log until the process ends
  return *mutex;
}
std::function<void(const std::string&)>& Sink() {
  static auto* const sink = new std::function<void(const std::string&)>;
  return *sink;
}

std::string Timestamp() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const int64_t micros = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  const std::time_t seconds = static_cast<std::time_t>(micros / 1000000);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char date[32];
  std::strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%S", &utc);
  char text[48];
  std::snprintf(text, sizeof(text), "%s.%06dZ", date, static_cast<int>(micros % 1000000));
  return text;
}

// As inside a JSON string. Bytes that are not ASCII become \u00XX, so any input gives valid UTF-8.
void AppendEscaped(const std::string& value, std::string* out) {
  const size_t size = std::min(value.size(), kMaxValueBytes);
  for (size_t i = 0; i < size; ++i) {
    const auto c = static_cast<unsigned char>(value[i]);
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(static_cast<char>(c));
    } else if (c == '\n') {
      out->append("\\n");
    } else if (c == '\t') {
      out->append("\\t");
    } else if (c < 0x20 || c >= 0x7f) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", c);
      out->append(escape);
    } else {
      out->push_back(static_cast<char>(c));
    }
  }
  if (size < value.size()) out->append("...");
}

void AppendQuoted(const std::string& value, std::string* out) {
  out->push_back('"');
  AppendEscaped(value, out);
  out->push_back('"');
}

bool IsPlain(const std::string& value) {
  if (value.empty() || value.size() > kMaxValueBytes) return false;
  for (const char c : value) {
    if (c <= ' ' || c >= 0x7f || c == '"' || c == '\\' || c == '=') return false;
  }
  return true;
}

std::string TextLine(LogLevel level, const char* module, const std::string& message,
                     std::initializer_list<LogField> fields) {
  std::string line = Timestamp();
  line.append(" ").append(kLevelNames[static_cast<int>(level)]).append(" ").append(module).append(" ");
  AppendEscaped(message, &line);
  for (const LogField& field : fields) {
    line.append(" ").append(field.key).append("=");
    if (IsPlain(field.value)) {
      line.append(field.value);
    } else {
      AppendQuoted(field.value, &line);
    }
  }
  return line;
}

std::string JsonLine(LogLevel level, const char* module, const std::string& message,
                     std::initializer_list<LogField> fields) {
  std::string line = "{\"ts\":\"" + Timestamp() + "\",\"level\":\"" + kLevelNames[static_cast<int>(level)] +
                     "\",\"module\":\"" + module + "\",\"message\":";
  AppendQuoted(message, &line);
  for (const LogField& field : fields) {
    line.append(",\"").append(field.key).append("\":");
    if (field.is_text) {
      AppendQuoted(field.value, &line);
    } else {
      line.append(field.value);
    }
  }
  line.push_back('}');
  return line;
}

void WriteToStderr(std::string line) {
  line.push_back('\n');
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t wrote = write(STDERR_FILENO, line.data() + done, line.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return;  // a broken log must not break the daemon
    done += static_cast<size_t>(wrote);
  }
}

}  // namespace

std::string LogField::DoubleText(double v) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.6g", v);
  return text;
}

absl::Status SetLogLevel(const std::string& name) {
  for (int level = 0; level < 4; ++level) {
    if (name == kLevelNames[level]) {
      g_level.store(level, std::memory_order_relaxed);
      return absl::OkStatus();
    }
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_LOG_LEVEL",
                   "log level \"" + name + "\" is none of debug, info, warning, error", {{"level", name}});
}

absl::Status SetLogFormat(const std::string& name) {
  if (name != "text" && name != "json") {
    return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_LOG_FORMAT",
                     "log format \"" + name + "\" is none of text, json", {{"format", name}});
  }
  g_json.store(name == "json", std::memory_order_relaxed);
  return absl::OkStatus();
}

std::string GetLogLevel() { return kLevelNames[g_level.load(std::memory_order_relaxed)]; }

bool LogEnabled(LogLevel level) { return static_cast<int>(level) >= g_level.load(std::memory_order_relaxed); }

void LogEvent(LogLevel level, const char* module, const std::string& message, std::initializer_list<LogField> fields) {
  const bool json = g_json.load(std::memory_order_relaxed);
  std::string line = json ? JsonLine(level, module, message, fields) : TextLine(level, module, message, fields);
  std::lock_guard<std::mutex> lock(SinkMutex());
  if (Sink()) {
    Sink()(line);
  } else {
    WriteToStderr(std::move(line));
  }
}

void SetLogSinkForTest(std::function<void(const std::string&)> sink) {
  std::lock_guard<std::mutex> lock(SinkMutex());
  Sink() = std::move(sink);
}

}  // namespace spectrumkv
