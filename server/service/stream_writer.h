// The writing half of a server stream whose messages come from other threads. Internal to server/service.
//
// gRPC takes one message at a time, and may call back inside StartWrite: so what to do next is decided under the lock
// and done outside it. Finish is called exactly once, with no write under way.
#pragma once

#include <mutex>
#include <utility>

#include <grpcpp/support/server_callback.h>
#include <grpcpp/support/status.h>

namespace spectrumkv {

// Base is ServerWriteReactor or ServerBidiReactor.
template <typename Base, typename Response>
class StreamWriter : public Base {
 public:
  void OnWriteDone(bool ok) final {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      writing_ = false;
      if (!ok) broken_ = true;
    }
    Pump();
  }

  void OnCancel() final {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      broken_ = true;
    }
    Pump();
  }

 protected:
  // Under the lock: fills the next message, or answers false when there is none now.
  virtual bool NextLocked(Response* next) = 0;

  // The stream ends with `status` once NextLocked has no more; the first call counts.
  void EndLocked(grpc::Status status) {
    if (ending_) return;
    ending_ = true;
    end_status_ = std::move(status);
  }
  bool ending_locked() const { return ending_; }

  // After anything NextLocked or EndLocked depends on has changed. Not under the lock.
  void Pump() {
    bool finish = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (writing_ || finished_) return;
      response_.Clear();
      if (!broken_ && NextLocked(&response_)) {
        writing_ = true;
      } else if (ending_ || broken_) {
        finished_ = finish = true;
      } else {
        return;
      }
    }
    if (finish) {
      this->Finish(ending_ ? end_status_ : grpc::Status(grpc::StatusCode::CANCELLED, "the client is gone"));
    } else {
      this->StartWrite(&response_);
    }
  }

  std::mutex mutex_;

 private:
  bool writing_ = false, finished_ = false, broken_ = false, ending_ = false;
  grpc::Status end_status_;
  Response response_;
};

}  // namespace spectrumkv
