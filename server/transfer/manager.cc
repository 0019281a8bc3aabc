#include "server/transfer/manager.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/base/ids.h"
#include "server/base/log.h"
#include "server/base/status.h"
#include "server/transfer/manager_errors.h"
#include "server/transfer/receiver.h"
#include "server/transfer/sender.h"
#include "server/transfer/shape.h"
#include "server/transfer/units.h"

namespace spectrumkv {
std::unique_ptr<TransferManager> TransferManager::Create(TransferOptions options, TransferParts parts) {
  return std::make_unique<TransferManagerImpl>(options, parts);
}

TransferManagerImpl::TransferManagerImpl(TransferOptions options, TransferParts parts)
    : options_(options),
      parts_(parts),
      parking_(parts.clock, options.max_waiting_peers, std::max<int64_t>(1, options.progress_timeout_ms / 3),
               options.max_deadline_ms),
      rates_(options.compute_threads, options.inline_chunk_bytes),
      staging_(std::make_shared<StagingRoom>(options.staging_bytes)),
      cache_(std::make_shared<StagingRoom>(options.cache_bytes)) {
  door_->manager = this;
  LearnSpeeds();
}

TransferManagerImpl::~TransferManagerImpl() { Shutdown(); }

template <typename Spec>
TransferSetup TransferManagerImpl::SetupOf(Role role, const Spec& spec) {
  TransferSetup setup;
  setup.options = &options_;
  setup.parts = &parts_;
  setup.host = this;
  setup.role = role;
  setup.id = spec.transfer_id;
  setup.token = spec.transfer_token;
  setup.peer = spec.peer;
  setup.fingerprint = spec.fingerprint;
  setup.part = spec.part;
  return setup;
}

template <typename Spec>
TransferManagerImpl::NewHalf TransferManagerImpl::HalfOf(const Spec& spec, const PoolSchema& schema) {
  NewHalf half{spec.owner, spec.pool_id, spec.transfer_token, spec.peer, spec.fingerprint, spec.part, {}, {}, nullptr};
  std::vector<LayerPlace> places;
  for (const PlanLayer& layer : PlanLayersOf(schema, &places)) half.layers.push_back(layer.layer);
  return half;
}

absl::Status TransferManagerImpl::CheckNew(const Key& key, const NewHalf& half) {
  if (!IsId(key.second)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_TRANSFER_ID",
                     absl::StrCat("transfer_id must be ", IdRule()));
  }
  Forget();
  const auto it = entries_.find(key);
  if (draining_ && (it == entries_.end() || it->second.group == nullptr)) {  // what has begun gets its other parts
    return MakeError(absl::StatusCode::kUnavailable, "DRAINING", "the daemon is draining and takes no new transfers");
  }
  if (it != entries_.end()) {
    if (absl::Status joins = CheckJoins(it->second, key, half); !joins.ok()) return joins;
  }
  if (active_ >= options_.max_active) {
    return MakeError(absl::StatusCode::kResourceExhausted, "TRANSFERS_FULL",
                     absl::StrCat("already ", active_, " transfers are active, the limit is ", options_.max_active),
                     {{"limit", absl::StrCat(options_.max_active)}}, kTransferRetryMs);
  }
  return CheckQuotas(half);
}

absl::Status TransferManagerImpl::StartSender(SenderSpec spec) {
  NewHalf half = HalfOf(spec, spec.source->schema());
  half.refines = spec.refines;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (absl::Status ok = CheckNew({Role::kSender, spec.transfer_id}, half); !ok.ok()) return ok;
  }
  if (absl::Status chosen = ChooseBudgetOf(&spec); !chosen.ok()) return chosen;
  const bool dials = !spec.peer.empty();
  TransferSetup setup = SetupOf(Role::kSender, spec);
  setup.refines = spec.refines;
  absl::StatusOr<std::shared_ptr<SenderTransfer>> sender = SenderTransfer::Create(std::move(setup), std::move(spec));
  if (!sender.ok()) return sender.status();
  return Insert(*sender, dials, half);
}

absl::Status TransferManagerImpl::StartReceiver(ReceiverSpec spec) {
  const bool dials = !spec.peer.empty();
  NewHalf half = HalfOf(spec, spec.target->schema());
  TransferSetup setup = SetupOf(Role::kReceiver, spec);
  if (spec.refinement != nullptr) {
    half.refinement = spec.refinement;
    half.refines = setup.refines = spec.refinement->base().transfer_id;
    setup.peer_epoch = spec.refinement->base().peer_epoch;
  }
  return Insert(std::make_shared<ReceiverTransfer>(std::move(setup), std::move(spec)), dials, half);
}

absl::Status TransferManagerImpl::Insert(const std::shared_ptr<Transfer>& transfer, bool dials,
                                         const NewHalf& half) {
  const Key key{transfer->role(), transfer->id()};
  bool first;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (absl::Status ok = CheckNew(key, half); !ok.ok()) return ok;
    if (!half.refines.empty()) {
      const auto kept = kept_.find({key.first, half.refines});
      if (kept == kept_.end() || kept->second.ended) return NotRetained(half.refines);
      if (kept->second.moving) return SourceMoves();
      kept->second.children.insert(key.second);
    }
    Entry& entry = entries_[key];
    entry.refinement = half.refinement;
    if (half.refinement != nullptr) {
      auto& refinements = entries_[{key.first, half.refines}].refinements;
      std::erase_if(refinements, [](const auto& old) { return old.expired(); });
      refinements.push_back(half.refinement);
    }
    first = !entry.live();
    entry.token = half.token;
    entry.peer = half.peer;
    entry.owner = half.owner;
    entry.part_count = half.part.count;
    entry.dials |= dials;
    if (half.part.count == 1) {
      entry.transfer = transfer;
      // First on its strand: whoever finds the entry, a peer's hello above all, comes later.
      transfer->Post([t = transfer.get()] { t->Start(); });
    } else {
      if (first) entry.group = NewGroup(key, half.part.count);
      if (!entry.group->Add(transfer, half.layers)) return PartTooLate(key.second, entry.group->Ending());
    }
    entry.fingerprints[half.part.index] = half.fingerprint;
    if (first) parts_.metrics->AddInflightTransfers(1);
    if (first && entry.group != nullptr) ++untold_;
    ++active_;
    ++active_of_owner_[half.owner];
    ++active_of_pool_[half.pool_id];
    ++untold_;
  }
  // At first also who counts parts otherwise: both are told.
  Welcome(key, first ? std::nullopt : std::optional<uint32_t>(half.part.index));
  return absl::OkStatus();
}

absl::Status TransferManagerImpl::Advance(const Caller& caller, const std::string& transfer_id, uint32_t layers, uint32_t tokens,
                                          const LaterImportance& importance, const std::string& written_event,
                                          uint32_t part_index) {
  std::shared_ptr<Transfer> transfer;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const absl::StatusOr<Key> key = KeyOf(caller, transfer_id, Role::kSender);
    if (!key.ok()) return key.status();
    const Entry& entry = entries_.at(*key);
    if (entry.live() && entry.fingerprints.count(part_index) == 0) return UnknownPart(transfer_id, part_index);
    transfer = entry.Find(part_index);
    if (transfer == nullptr) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "TRANSFER_TERMINAL",
                       absl::StrCat("transfer ", transfer_id, " has ended: ", StateName(entry.Now().state)));
    }
  }
  return static_cast<SenderTransfer*>(transfer.get())->Advance(layers, tokens, importance, written_event);
}

absl::StatusOr<TransferReport> TransferManagerImpl::Get(const Caller& caller, const std::string& transfer_id, std::optional<Role> role) {
  std::lock_guard<std::mutex> lock(mutex_);
  absl::StatusOr<Key> key = KeyOf(caller, transfer_id, role);
  if (!key.ok()) return key.status();
  const Entry& entry = entries_.at(*key);
  TransferReport report = entry.Now();
  FillRefinement(*key, entry, &report);
  return report;
}

absl::StatusOr<uint64_t> TransferManagerImpl::Watch(const Caller& caller, const std::string& transfer_id, std::optional<Role> role,
                                                    std::shared_ptr<TransferWatcher> watcher) {
  std::unique_lock<std::mutex> lock(mutex_);
  absl::StatusOr<Key> key = KeyOf(caller, transfer_id, role);
  if (!key.ok()) return key.status();
  const Entry& entry = entries_.at(*key);
  const uint64_t watch_id = next_watch_++;
  if (entry.group != nullptr) {
    entry.group->AddWatcher(watch_id, std::move(watcher));
    return watch_id;
  }
  if (entry.transfer == nullptr) {
    const TransferReport report = entry.report;
    lock.unlock();
    if (report.layers_ready > 0) watcher->OnLayersReady(report.layers_ready);
    watcher->OnTerminal(report);
    return watch_id;
  }
  const std::shared_ptr<Transfer> transfer = entry.transfer;
  lock.unlock();
  Transfer* t = transfer.get();
  transfer->Post([t, watch_id, watcher] { t->AddWatcher(watch_id, watcher); });
  return watch_id;
}

void TransferManagerImpl::Unwatch(const std::string& transfer_id, Role role, uint64_t watch_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto kept = kept_.find({role, transfer_id});
  if (kept != kept_.end()) kept->second.exact_waiters.erase(watch_id);
  const auto it = entries_.find({role, transfer_id});
  if (it == entries_.end()) return;
  if (it->second.group != nullptr) return it->second.group->RemoveWatcher(watch_id);
  if (it->second.transfer == nullptr) return;
  Transfer* t = it->second.transfer.get();
  t->Post([t, watch_id] { t->RemoveWatcher(watch_id); });
}

void TransferManagerImpl::Cancel(const Caller& caller, const std::string& transfer_id, std::optional<Role> role,
                                 std::function<void(absl::StatusOr<TransferReport>)> done) {
  std::shared_ptr<Transfer> transfer;
  std::shared_ptr<PartGroup> group;
  absl::StatusOr<TransferReport> answer = UnknownTransfer(transfer_id);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    absl::StatusOr<Key> key = KeyOf(caller, transfer_id, role);
    if (!key.ok()) {
      answer = key.status();
    } else {
      transfer = entries_.at(*key).transfer;
      group = entries_.at(*key).group;
      if (transfer == nullptr) answer = entries_.at(*key).report;
    }
  }
  if (group != nullptr) return group->Cancel(std::move(done));
  if (transfer == nullptr) return done(std::move(answer));
  Transfer* t = transfer.get();
  transfer->Post([t, done = std::move(done)] { t->Cancel(done); });
}

absl::Status TransferManagerImpl::Release(const Caller& caller, const std::string& transfer_id, std::optional<Role> role) {
  Entry waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    absl::StatusOr<Key> key = KeyOf(caller, transfer_id, role);
    if (!key.ok()) return key.status();
    const auto it = entries_.find(*key);
    if (!it->second.live()) {
      if (kept_.count(*key) != 0) return StillRetained(transfer_id);
      ended_.erase(std::remove(ended_.begin(), ended_.end(), *key), ended_.end());
      entries_.erase(it);
      return absl::OkStatus();
    }
    const bool published = key->first == Role::kSender && !it->second.dials;
    if (!published || it->second.Now().state != TransferState::kWaiting) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "TRANSFER_ACTIVE",
                       absl::StrCat("transfer ", transfer_id, " is running: cancel it, or wait for its end"));
    }
    waiting = it->second;
  }
  const auto heard = [](const absl::StatusOr<TransferReport>&) {};
  if (waiting.group != nullptr) {
    waiting.group->Cancel(heard);
  } else {
    waiting.transfer->Post([t = waiting.transfer.get(), heard] { t->Cancel(heard); });
  }
  return absl::OkStatus();
}

absl::Status TransferManagerImpl::ReportFirstToken(const Caller& caller, const std::string& transfer_id, std::optional<Role> role,
                                                   double seconds) {
  if (!(seconds >= 0 && seconds < 1e6)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "OUT_OF_RANGE",
                     absl::StrCat("time_to_first_token_seconds ", seconds, " is not in 0..1e6"));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  absl::StatusOr<Key> key = KeyOf(caller, transfer_id, role);
  if (!key.ok()) return key.status();
  Entry& entry = entries_.at(*key);
  if (entry.first_token_reported) {
    return MakeError(absl::StatusCode::kAlreadyExists, "ALREADY_REPORTED",
                     absl::StrCat("the first token of transfer ", transfer_id, " was reported before"));
  }
  entry.first_token_reported = true;
  parts_.metrics->ObserveFirstToken(seconds);
  return absl::OkStatus();
}

std::vector<TransferReport> TransferManagerImpl::List(uint32_t limit, bool active_only) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<TransferReport> reports;
  for (const auto& [key, entry] : entries_) {
    if (entry.live() && reports.size() < limit) reports.push_back(entry.Now());
  }
  std::sort(reports.begin(), reports.end(),
            [](const TransferReport& a, const TransferReport& b) { return a.duration_seconds < b.duration_seconds; });
  if (active_only) return reports;
  for (auto it = ended_.rbegin(); it != ended_.rend() && reports.size() < limit; ++it) {
    reports.push_back(entries_.at(*it).report);
  }
  return reports;
}

uint32_t TransferManagerImpl::active() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return active_;
}

std::shared_ptr<ControlListener> TransferManagerImpl::OnControl(std::shared_ptr<ControlStream> stream) {
  auto session = std::make_shared<ControlSession>(
      [this](std::shared_ptr<ControlSession> s, HelloFrame hello) { OnHello(std::move(s), std::move(hello)); },
      [this](const ControlSession* s, const absl::Status& status) {
        // Refused, broken or never joined: no transfer counts it.
        parking_.Forget(s);
        parts_.metrics->CountError(MetricStage::kQueue, status.code());
      },
      frame_room_);
  session->BindStream(std::move(stream));
  return session;
}

void TransferManagerImpl::OnHello(std::shared_ptr<ControlSession> session, HelloFrame hello) {
  if (hello.refine.has_value()) return OnRefineHello(std::move(session), std::move(hello));
  const std::shared_ptr<ControlStream> stream = session->stream();
  if (stream == nullptr && !session->LastWords().has_value()) return;
  const Role ours = hello.role == Role::kSender ? Role::kReceiver : Role::kSender;
  absl::Status refusal;
  std::shared_ptr<Transfer> transfer;
  std::optional<TransferReport> late;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = entries_.find({ours, hello.transfer_id});
    if (hello.format_version != 1) {
      refusal = UnsupportedVersion(hello.format_version);
    } else if (absl::Status part = CheckPartOf(hello); !part.ok()) {
      refusal = std::move(part);
    } else if (hello.expected_epoch != 0 && hello.expected_epoch != options_.epoch) {  // nobody brings our half again
      refusal = PeerRestarted();
    } else if (it != entries_.end() && !ConstantTimeEqual(it->second.token, hello.transfer_token)) {
      refusal = TokenOfAnother();
    } else if (it != entries_.end()) {
      refusal = CheckPartCount(it->second, ours, hello);
      if (refusal.ok()) transfer = it->second.Find(hello.part_index);
      late = LateAnswer(it->second, hello.part_index);
    } else if (draining_) {
      refusal = Draining();
    }
  }
  if (transfer != nullptr) {
    Transfer* t = transfer.get();
    return transfer->Post([t, session, hello = std::move(hello)] { t->Adopt(session, hello); });
  }
  if (refusal.ok() && late.has_value()) return AnswerLate(*late, ours, session.get());
  if (refusal.ok()) {
    refusal = parking_.Park(ours, session, hello, stream != nullptr ? stream->peer() : "");
    if (refusal.ok()) {
      // The half may have come between the look-up and the parking.
      std::unique_lock<std::mutex> lock(mutex_);
      const auto it = entries_.find({ours, hello.transfer_id});
      const bool here = it != entries_.end() && (!it->second.live() || it->second.Find(hello.part_index) != nullptr);
      const bool late_for_drain = draining_ && it == entries_.end();
      lock.unlock();
      if (late_for_drain) {
        parking_.Forget(session.get());
        if (stream != nullptr) stream->Close(Draining());
      }
      if (here) Welcome({ours, hello.transfer_id}, hello.part_index);
      return;
    }
  }
  if (stream != nullptr) stream->Close(refusal);
}

// Late callers get the outcome.
void TransferManagerImpl::AnswerLate(const TransferReport& report, Role role, ControlSession* session) const {
  const std::shared_ptr<ControlStream> stream = session->stream();
  if (stream == nullptr) return;
  stream->Send(HelloReplyFrame{options_.epoch, 0, {}});
  const int32_t code = static_cast<int32_t>(report.error.code());
  const std::string message(report.error.message());
  if (role == Role::kReceiver) {
    ReceiptFrame receipt{report.state, code, ReasonOf(report.error), message, report.chunks, report.chunks_duplicate,
                         report.first_layer_ready_seconds};
    receipt.decoded_on_gpu = report.coded_by() == CodedBy::kGpu;
    stream->Send(receipt);
  } else if (report.state == TransferState::kCommitted) {
    return stream->Close(MakeError(absl::StatusCode::kAlreadyExists, "TRANSFER_EXISTS",
                                   "this transfer was sent before and has committed"));
  } else {
    stream->Send(CancelFrame{report.state, code, ReasonOf(report.error), message});
  }
  stream->Close(absl::OkStatus());
}

std::shared_ptr<DataListener> TransferManagerImpl::OnData(std::shared_ptr<DataStream> stream,
                                                          const DataOpenFrame& open) {
  std::shared_ptr<Transfer> transfer;
  uint32_t attempt = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = sessions_.find(open.session);
    if (it != sessions_.end()) {
      transfer = it->second.transfer.lock();
      attempt = it->second.attempt;
    }
  }
  if (transfer == nullptr || transfer->id() != open.transfer_id || attempt != open.attempt) return nullptr;
  if (open.part_index != transfer->part().index) return nullptr;
  parts_.metrics->AddOverheadBytes(MessageBytes(open));
  Transfer* t = transfer.get();
  transfer->Post([t, attempt, stream] { t->AdoptData(attempt, stream); });
  return std::make_shared<DataSession>(transfer, attempt);
}

void TransferManagerImpl::OnStranger(const absl::Status& status) {
  parts_.metrics->CountError(MetricStage::kQueue, status.code());
}

void TransferManagerImpl::OnDataRefused(const absl::Status& status) {
  parts_.metrics->CountError(MetricStage::kReceive, status.code());
}

uint64_t TransferManagerImpl::NewSession(const std::shared_ptr<Transfer>& transfer, uint32_t attempt) {
  const uint64_t session = RandomU64();
  std::lock_guard<std::mutex> lock(mutex_);
  sessions_[session] = Session{transfer, attempt};
  return session;
}

void TransferManagerImpl::DropSession(uint64_t session) {
  std::lock_guard<std::mutex> lock(mutex_);
  sessions_.erase(session);
}

void TransferManagerImpl::OnSettled(const std::shared_ptr<Transfer>& transfer) {
  std::shared_ptr<Transfer> last;  // let go outside the lock
  std::shared_ptr<Refinement> refinement;
  const Key key{transfer->role(), transfer->id()};
  const TransferReport report = transfer->Snapshot();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const Entry& entry = entries_.at(key);
    last = entry.transfer;
    refinement = entry.refinement;
    --active_;
    if (--active_of_owner_[entry.owner] == 0) active_of_owner_.erase(entry.owner);
    if (--active_of_pool_[report.pool_id] == 0) active_of_pool_.erase(report.pool_id);
    if (!transfer->is_part()) Remember(key, report);
  }
  if (transfer->refines()) OnRefined(key, report, refinement);
}

}  // namespace spectrumkv
