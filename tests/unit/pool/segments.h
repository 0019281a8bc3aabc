// Segments for tests: shared memory objects and a directory of files, removed at the end.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

namespace spectrumkv {

// "/skvtest-<pid>-<n>". Full of the byte `fill`, so not sparse.
class ShmObject {
 public:
  explicit ShmObject(size_t bytes, int fill = 1) : name_(NewName()) {
    fd_ = shm_open(name_.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    EXPECT_GE(fd_, 0);
    Write(bytes, fill);
  }
  ~ShmObject() {
    close(fd_);
    shm_unlink(name_.c_str());
  }
  ShmObject(const ShmObject&) = delete;
  ShmObject& operator=(const ShmObject&) = delete;
  const std::string& name() const { return name_; }
  void Truncate(size_t bytes) { ASSERT_EQ(ftruncate(fd_, static_cast<off_t>(bytes)), 0); }

  static std::string NewName() {
    static int count = 0;
    return "/skvtest-" + std::to_string(getpid()) + "-" + std::to_string(++count);
  }

 private:
  void Write(size_t bytes, int fill) {
    const std::vector<char> data(bytes, static_cast<char>(fill));
    EXPECT_EQ(write(fd_, data.data(), bytes), static_cast<ssize_t>(bytes));
  }
  std::string name_;
  int fd_ = -1;
};

class TempDir {
 public:
  TempDir() {
    std::string path = (std::filesystem::temp_directory_path() / "skvtest-XXXXXX").string();
    EXPECT_NE(mkdtemp(path.data()), nullptr);
    path_ = path;
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

  void WriteFile(const std::string& name, size_t bytes) const {
    const int fd = open((*this / name).c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    ASSERT_GE(fd, 0);
    const std::vector<char> data(bytes, 1);
    EXPECT_EQ(write(fd, data.data(), bytes), static_cast<ssize_t>(bytes));
    fsync(fd);  // st_blocks counts what the file system has placed
    close(fd);
  }

 private:
  std::string path_;
};

}  // namespace spectrumkv
