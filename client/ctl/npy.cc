#include "client/ctl/npy.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <regex>
#include <sstream>
#include <system_error>

#include "client/cpp/status.h"

namespace spectrumkv::ctl {
namespace {

const char kMagic[] = "\x93NUMPY";
constexpr size_t kMagicBytes = 6, kAlignment = 64, kMaxHeaderBytes = 65536;

absl::Status Bad(const std::string& what) {
  return client::MakeError(absl::StatusCode::kInvalidArgument, "BAD_NPY", "the file is no usable .npy: " + what);
}

absl::Status BadFile(const std::string& what) {
  return client::MakeError(absl::StatusCode::kInvalidArgument, "BAD_FILE", what);
}

absl::Status Failed(const char* verb, const std::string& path) {
  return BadFile(std::string("cannot ") + verb + " " + path + ": " + std::generic_category().message(errno));
}

// 0 for an element type that is not used here.
uint64_t ItemBytes(const std::string& descr) {
  if (descr == "<f2" || descr == "<u2" || descr == "<i2") return 2;
  return descr == "<f4" || descr == "<u4" ? 4 : 0;
}

absl::Status ParseHeader(const std::string& header, Array* array) {
  static const std::regex kDescr(R"('descr'\s*:\s*'([^']*)')");
  static const std::regex kOrder(R"('fortran_order'\s*:\s*(True|False))");
  static const std::regex kShape(R"('shape'\s*:\s*\(([0-9, ]*)\))");
  std::smatch match;
  if (!std::regex_search(header, match, kDescr)) return Bad("no descr");
  array->descr = match[1];
  if (ItemBytes(array->descr) == 0) return Bad("elements of type " + array->descr);
  if (!std::regex_search(header, match, kOrder)) return Bad("no fortran_order");
  if (match[1] == "True") return Bad("it is in Fortran order; save it as np.ascontiguousarray(x)");
  if (!std::regex_search(header, match, kShape)) return Bad("no shape");
  std::istringstream dims(match[1]);
  for (std::string dim; std::getline(dims, dim, ',');) {
    std::istringstream number(dim);
    uint64_t value = 0;
    if (number >> value) array->shape.push_back(value);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  struct stat info = {};
  if (stat(path.c_str(), &info) != 0) return Failed("read", path);
  if (!S_ISREG(info.st_mode)) return BadFile(path + " is not a regular file");
  std::ifstream file(path, std::ios::binary);
  if (!file) return Failed("read", path);
  std::string data(static_cast<size_t>(info.st_size), '\0');
  file.read(data.data(), info.st_size);
  if (file.gcount() != info.st_size)
    return BadFile(path + " ends before its " + std::to_string(info.st_size) + " bytes");
  return data;
}

absl::Status WriteFile(const std::string& path, const std::string& data) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(data.data(), static_cast<std::streamsize>(data.size()));
  file.close();
  if (file) return absl::OkStatus();
  return Failed("write", path);
}

absl::StatusOr<Array> ParseNpy(const std::string& file) {
  if (file.size() < 10 || file.compare(0, kMagicBytes, kMagic, kMagicBytes) != 0) return Bad("its magic is missing");
  const bool wide = file[6] >= 2;
  const size_t start = wide ? 12 : 10;
  if (file.size() < start) return Bad("it is truncated");
  uint32_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data() + 8, wide ? 4 : 2);
  if (header_bytes > kMaxHeaderBytes || header_bytes > file.size() - start) return Bad("its header is truncated");
  Array array;
  if (const absl::Status status = ParseHeader(file.substr(start, header_bytes), &array); !status.ok()) return status;
  uint64_t bytes = ItemBytes(array.descr);
  for (const uint64_t dim : array.shape) {
    if (__builtin_mul_overflow(bytes, dim, &bytes)) return Bad("its shape overflows");
  }
  if (bytes != file.size() - start - header_bytes) {
    return Bad("its shape needs " + std::to_string(bytes) + " bytes, it has " +
               std::to_string(file.size() - start - header_bytes));
  }
  array.data = file.substr(start + header_bytes);
  return array;
}

std::string FormatNpy(const Array& array) {
  std::string shape;
  for (const uint64_t dim : array.shape) shape += std::to_string(dim) + ", ";
  std::string header = "{'descr': '" + array.descr + "', 'fortran_order': False, 'shape': (" + shape + "), }";
  const size_t unpadded = 10 + header.size() + 1;
  header.append((kAlignment - unpadded % kAlignment) % kAlignment, ' ');
  header += '\n';
  const auto header_bytes = static_cast<uint16_t>(header.size());
  std::string file(kMagic, kMagicBytes);
  file += std::string("\x01\x00", 2);
  file.append(reinterpret_cast<const char*>(&header_bytes), sizeof(header_bytes));
  return file + header + array.data;
}

}  // namespace spectrumkv::ctl
