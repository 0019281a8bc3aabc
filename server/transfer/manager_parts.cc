// What TransferManagerImpl does with transfers of several parts: how one joins the others, and how all end.
#include "absl/strings/str_cat.h"
#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/transfer/manager.h"
#include "server/transfer/manager_errors.h"

namespace spectrumkv {
namespace {

absl::Status InvalidPart(const std::string& field, const std::string& what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_PART", absl::StrCat(field, " ", what),
                   {{"field", field}});
}

}  // namespace

TransferReport TransferManagerImpl::Entry::Now() const {
  if (!live()) return report;
  TransferReport now = transfer != nullptr ? transfer->Snapshot() : group->Snapshot();
  if (!IsTerminal(now.state)) return now;
  now.state = TransferState::kVerifying;  // an end is told once it is remembered: whoever sees it may release at once
  now.error = absl::OkStatus();
  return now;
}

std::shared_ptr<Transfer> TransferManagerImpl::Entry::Find(uint32_t part_index) const {
  if (group != nullptr) return group->Find(part_index);
  return part_index == 0 ? transfer : nullptr;
}

// Nothing: `entry` has no such part yet, and room for it.
std::optional<absl::Status> TransferManagerImpl::FindPart(const Entry& entry, const Key& key, PartId part,
                                                          const std::string& fingerprint) const {
  const auto here = entry.fingerprints.find(part.index);
  if (part.count != entry.part_count) {
    if (entry.part_count == 1 || part.count == 1) return TransferExists(key.second);
    return InvalidPart("part.count", absl::StrCat("is ", part.count, ", that of the parts that are here is ",
                                                  entry.part_count));
  }
  if (here != entry.fingerprints.end()) {  // ended: a repeat would promise a transfer that will not come
    return here->second == fingerprint && entry.live() ? absl::OkStatus() : TransferExists(key.second);
  }
  if (!entry.live()) return PartTooLate(key.second, entry.report.error);
  if (absl::Status why = entry.group->Ending(); !why.ok()) return PartTooLate(key.second, why);
  return std::nullopt;
}

// A new part beside those of `entry`.
absl::Status TransferManagerImpl::CheckJoins(const Entry& entry, const Key& key, const NewHalf& half) const {
  if (!(entry.owner == half.owner)) return TransferExists(key.second);
  if (const auto found = FindPart(entry, key, half.part, half.fingerprint)) return found->ok() ? TransferExists(key.second) : *found;
  if (!ConstantTimeEqual(entry.token, half.token)) {
    return InvalidPart("transfer_token", "is not that of the parts that are here");
  }
  if (key.first == Role::kSender && entry.peer != half.peer) {
    return InvalidPart("peer", absl::StrCat("is ", half.peer, ", the parts that are here go to ", entry.peer,
                                            "; the receiver of a transfer is one daemon"));
  }
  return absl::OkStatus();
}

std::shared_ptr<PartGroup> TransferManagerImpl::NewGroup(const Key& key, uint32_t count) {
  PartGroup::Host host;
  host.over = [this](const std::shared_ptr<PartGroup>& group, const TransferReport& whole) { OnPartsOver(group, whole); };
  host.told = [this] { Told(); };
  return std::make_shared<PartGroup>(key.first, key.second, count, &parts_, std::move(host));
}

void TransferManagerImpl::OnPartsOver(const std::shared_ptr<PartGroup>& group, const TransferReport& whole) {
  const Key key{group->role(), group->id()};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Remember(key, whole);
  }
  parts_.metrics->AddInflightTransfers(-1);
  // Peers that wait for a part which will not come.
  Welcome(key);
}

void TransferManagerImpl::Remember(const Key& key, const TransferReport& report) {
  Entry& entry = entries_.at(key);
  entry.report = report;
  entry.ended_ns = parts_.clock->NowNs();
  entry.transfer = nullptr;
  entry.group = nullptr;
  ended_.push_back(key);
}

// What a peer is told that asks for a part of a transfer that is over.
std::optional<TransferReport> TransferManagerImpl::LateAnswer(const Entry& entry, uint32_t part_index) {
  if (entry.live()) return std::nullopt;
  for (const TransferReport& part : entry.report.parts) {
    if (part.part.index == part_index) return part;
  }
  return entry.report;
}

void TransferManagerImpl::Welcome(const Key& key, std::optional<uint32_t> part_index) {
  for (Parking::Parked& parked : parking_.Take(key.first, key.second, part_index)) {
    OnHello(std::move(parked.session), std::move(parked.hello));
  }
}

absl::Status TransferManagerImpl::CheckPartOf(const HelloFrame& hello) {
  if (hello.part_count == 0 || hello.part_count > kMaxParts || hello.part_index >= hello.part_count) {
    return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_PART",
                     absl::StrCat("part ", hello.part_index, " of ", hello.part_count, ", of at most ", kMaxParts));
  }
  return absl::OkStatus();
}

// Two halves that count parts differently never fit: both are told.
absl::Status TransferManagerImpl::CheckPartCount(const Entry& entry, Role ours, const HelloFrame& hello) const {
  if (!entry.live() || entry.part_count == hello.part_count) return absl::OkStatus();
  const std::string here = absl::StrCat(entry.part_count), there = absl::StrCat(hello.part_count);
  const std::string& source = ours == Role::kSender ? here : there;
  const std::string& destination = ours == Role::kSender ? there : here;
  absl::Status why = MakeError(
      absl::StatusCode::kFailedPrecondition, "SCHEMA_MISMATCH",
      absl::StrCat("source and destination differ in part_count: ", source, " and ", destination),
      {{"field", "part_count"}, {"source", source}, {"destination", destination}});
  if (entry.group != nullptr) {
    entry.group->Fail(why);
  } else {
    entry.transfer->Post([t = entry.transfer.get(), why] { t->Fail(why); });
  }
  return why;
}

}  // namespace spectrumkv
