// The parts of one transfer that this daemon has in one role: several pools whose blocks arrive together or not at all.
//
// Each part is a Transfer with a link, a plan and a fence of its own. Here is what they have in common: the decision how all
// end, which is made once, and who is told of it. A receiver commits when all its parts have everything and their memory has
// been looked at; from then on no part can end otherwise. A part that ends in any other way takes the others with it. A sender
// whose one part has the receiver's receipt knows that all have committed, for the receiver commits as one. Source:
// docs/architecture.md, "Parts".
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/transfer/transfer.h"

namespace spectrumkv {

// Thread-safe. Kept alive by its parts and its manager.
class PartGroup : public std::enable_shared_from_this<PartGroup> {
 public:
  // All parts that are here have settled. `told` comes after everybody has been told.
  struct Host {
    std::function<void(const std::shared_ptr<PartGroup>&, const TransferReport& whole)> over;
    std::function<void()> told;
  };
  PartGroup(Role role, std::string id, uint32_t count, const TransferParts* engine, Host host);

  const std::string& id() const { return id_; }
  Role role() const { return role_; }
  uint32_t count() const { return count_; }

  // Starts the part. `layers`: those of its pool, ascending. False: the transfer is ending, nothing may join it.
  // REQUIRES: no part of that index is here.
  bool Add(const std::shared_ptr<Transfer>& part, std::vector<uint32_t> layers);
  // Null: it is not here, or has ended.
  std::shared_ptr<Transfer> Find(uint32_t index) const;
  std::vector<std::shared_ptr<Transfer>> Live() const;
  // How it ends, as far as that is decided and not a commit.
  absl::Status Ending() const;

  // The sum of all parts, and each of them.
  TransferReport Snapshot() const;
  void AddWatcher(uint64_t id, std::shared_ptr<TransferWatcher> watcher);
  void RemoveWatcher(uint64_t id);
  void Cancel(std::function<void(absl::StatusOr<TransferReport>)> done);
  void Fail(const absl::Status& why);

  // For the parts, on their strands.
  enum class Ruling {
    kEnds,          // as it said
    kWillCommit,    // a receiver: all were found whole, the commit is on its way
    kHasCommitted,  // a sender that cannot learn its outcome: another part has the receipt
  };
  // Part `index` is about to reach the terminal `state`; `unknown`: it may have committed at the receiver. Parts of a
  // receiver that do not commit say what the first of them said, whatever they met themselves: `state` and `why` become that.
  Ruling OnEnding(uint32_t index, bool unknown, TransferState* state, absl::Status* why);
  // Of a receiver: all chunks of the part are decoded; its memory was found good after all parts had been complete.
  void OnComplete(uint32_t index) { Step(index, &Part::complete, &Transfer::BeginCommit); }
  void OnVerified(uint32_t index) { Step(index, &Part::verified, &Transfer::CommitDecided); }

 private:
  struct Part {
    std::shared_ptr<Transfer> transfer;  // until it has settled
    std::vector<uint32_t> layers;
    uint32_t layers_ready = 0;
    bool complete = false, verified = false;
    TransferReport report;  // once it has
  };
  class Ear;  // hears what a part tells its watchers

  void Step(uint32_t index, bool Part::*reached, void (Transfer::*next)());
  void OnLayers(uint32_t index, uint32_t layers);
  void OnPartSettled(uint32_t index, const TransferReport& report);
  void NotifyProgress();
  void TellTheEnd(const TransferReport& whole);
  uint32_t LayersReady() const;        // REQUIRES mutex_
  TransferReport SnapshotLocked() const;

  const Role role_;
  const std::string id_;
  const uint32_t count_;
  const TransferParts* const engine_;
  const Host host_;
  const int64_t started_ns_;

  mutable std::mutex mutex_;
  std::map<uint32_t, Part> parts_;
  bool committed_ = false;
  struct Outcome {
    uint32_t index;  // of the part that said so
    TransferState state;
    absl::Status why;
  };
  std::optional<Outcome> outcome_;  // of a transfer that does not commit: what the first part said
  std::optional<TransferReport> whole_;  // once all that are here have settled

  // Whoever is told is told in turn. What follows is of this strand.
  Strand strand_;
  std::map<uint64_t, std::shared_ptr<TransferWatcher>> watchers_;
  std::vector<std::function<void(absl::StatusOr<TransferReport>)>> cancel_waiters_;
  uint32_t layers_told_ = 0;
  bool told_ = false;
};

}  // namespace spectrumkv
