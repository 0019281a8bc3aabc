#include "server/transfer/manager.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/base/ids.h"
#include "server/base/log.h"
#include "server/base/status.h"
#include "server/transfer/manager_errors.h"
#include "server/transfer/receiver.h"
#include "server/transfer/sender.h"
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
      rates_(options.compute_threads, options.inline_chunk_bytes) {
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
  return setup;
}

absl::Status TransferManagerImpl::CheckNew(const Key& key, const Belongs& belongs) {
  if (!IsId(key.second)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "INVALID_TRANSFER_ID",
                     absl::StrCat("transfer_id must be ", IdRule()));
  }
  Forget();
  if (draining_) {
    return MakeError(absl::StatusCode::kUnavailable, "DRAINING", "the daemon is draining and takes no new transfers");
  }
  if (entries_.count(key) > 0) return TransferExists(key.second);
  if (active_ >= options_.max_active) {
    return MakeError(absl::StatusCode::kResourceExhausted, "TRANSFERS_FULL",
                     absl::StrCat("already ", active_, " transfers are active, the limit is ", options_.max_active),
                     {{"limit", absl::StrCat(options_.max_active)}}, kTransferRetryMs);
  }
  return CheckQuotas(belongs);
}

absl::Status TransferManagerImpl::StartSender(SenderSpec spec) {
  const Belongs belongs{spec.owner, spec.pool_id};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (absl::Status ok = CheckNew({Role::kSender, spec.transfer_id}, belongs); !ok.ok()) return ok;
  }
  if (absl::Status chosen = ChooseBudgetOf(&spec); !chosen.ok()) return chosen;
  const bool dials = !spec.peer.empty();
  TransferSetup setup = SetupOf(Role::kSender, spec);
  absl::StatusOr<std::shared_ptr<SenderTransfer>> sender = SenderTransfer::Create(std::move(setup), std::move(spec));
  if (!sender.ok()) return sender.status();
  return Insert(*sender, dials, belongs);
}

absl::Status TransferManagerImpl::StartReceiver(ReceiverSpec spec) {
  const bool dials = !spec.peer.empty();
  const Belongs belongs{spec.owner, spec.pool_id};
  TransferSetup setup = SetupOf(Role::kReceiver, spec);
  return Insert(std::make_shared<ReceiverTransfer>(std::move(setup), std::move(spec)), dials, belongs);
}

absl::Status TransferManagerImpl::Insert(const std::shared_ptr<Transfer>& transfer, bool dials,
                                         const Belongs& belongs) {
  const Key key{transfer->role(), transfer->id()};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (absl::Status ok = CheckNew(key, belongs); !ok.ok()) return ok;
    Entry entry;
    entry.transfer = transfer;
    entry.token = transfer->token();
    entry.fingerprint = transfer->fingerprint();
    entry.owner = belongs.owner;
    entry.pool_id = belongs.pool_id;
    entry.dials = dials;
    entries_.emplace(key, std::move(entry));
    ++active_;
    ++active_of_owner_[belongs.owner];
    ++active_of_pool_[belongs.pool_id];
    ++untold_;
    parts_.metrics->AddInflightTransfers(1);
    // First on its strand: whoever finds the entry, a peer's hello above all, comes later.
    Transfer* t = transfer.get();
    transfer->Post([t] { t->Start(); });
  }
  for (Parking::Parked& parked : parking_.Take(key.first, key.second)) {
    OnHello(std::move(parked.session), std::move(parked.hello));
  }
  return absl::OkStatus();
}

absl::Status TransferManagerImpl::Advance(const Caller& caller, const std::string& transfer_id, uint32_t layers, uint32_t tokens,
                                          const LaterImportance& importance, const std::string& written_event) {
  std::shared_ptr<Transfer> transfer;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const absl::StatusOr<Key> key = KeyOf(caller, transfer_id, Role::kSender);
    if (!key.ok()) return key.status();
    const Entry& entry = entries_.at(*key);
    transfer = entry.transfer;
    if (transfer == nullptr) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "TRANSFER_TERMINAL",
                       absl::StrCat("transfer ", transfer_id, " has ended: ", StateName(entry.report.state)));
    }
  }
  return static_cast<SenderTransfer*>(transfer.get())->Advance(layers, tokens, importance, written_event);
}

absl::StatusOr<TransferReport> TransferManagerImpl::Get(const Caller& caller, const std::string& transfer_id, std::optional<Role> role) {
  std::lock_guard<std::mutex> lock(mutex_);
  absl::StatusOr<Key> key = KeyOf(caller, transfer_id, role);
  if (!key.ok()) return key.status();
  const Entry& entry = entries_.at(*key);
  return entry.transfer != nullptr ? entry.transfer->Snapshot() : entry.report;
}

absl::StatusOr<uint64_t> TransferManagerImpl::Watch(const Caller& caller, const std::string& transfer_id, std::optional<Role> role,
                                                    std::shared_ptr<TransferWatcher> watcher) {
  std::unique_lock<std::mutex> lock(mutex_);
  absl::StatusOr<Key> key = KeyOf(caller, transfer_id, role);
  if (!key.ok()) return key.status();
  const Entry& entry = entries_.at(*key);
  const uint64_t watch_id = next_watch_++;
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
  const auto it = entries_.find({role, transfer_id});
  if (it == entries_.end() || it->second.transfer == nullptr) return;
  Transfer* t = it->second.transfer.get();
  t->Post([t, watch_id] { t->RemoveWatcher(watch_id); });
}

void TransferManagerImpl::Cancel(const Caller& caller, const std::string& transfer_id, std::optional<Role> role,
                                 std::function<void(absl::StatusOr<TransferReport>)> done) {
  std::shared_ptr<Transfer> transfer;
  absl::StatusOr<TransferReport> answer = UnknownTransfer(transfer_id);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    absl::StatusOr<Key> key = KeyOf(caller, transfer_id, role);
    if (!key.ok()) {
      answer = key.status();
    } else {
      transfer = entries_.at(*key).transfer;
      if (transfer == nullptr) answer = entries_.at(*key).report;
    }
  }
  if (transfer == nullptr) return done(std::move(answer));
  Transfer* t = transfer.get();
  transfer->Post([t, done = std::move(done)] { t->Cancel(done); });
}

absl::Status TransferManagerImpl::Release(const Caller& caller, const std::string& transfer_id, std::optional<Role> role) {
  std::shared_ptr<Transfer> waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    absl::StatusOr<Key> key = KeyOf(caller, transfer_id, role);
    if (!key.ok()) return key.status();
    const auto it = entries_.find(*key);
    if (it->second.transfer == nullptr) {
      ended_.erase(std::remove(ended_.begin(), ended_.end(), *key), ended_.end());
      entries_.erase(it);
      return absl::OkStatus();
    }
    const bool published = key->first == Role::kSender && !it->second.dials;
    if (!published || it->second.transfer->Snapshot().state != TransferState::kWaiting) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "TRANSFER_ACTIVE",
                       absl::StrCat("transfer ", transfer_id, " is running: cancel it, or wait for its end"));
    }
    waiting = it->second.transfer;
  }
  Transfer* t = waiting.get();
  waiting->Post([t] { t->Cancel([](absl::StatusOr<TransferReport>) {}); });
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
    if (entry.transfer != nullptr && reports.size() < limit) reports.push_back(entry.transfer->Snapshot());
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

void TransferManagerImpl::StartDraining(std::function<void()> done) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    draining_ = true;
    if (untold_ > 0) {
      drained_.push_back(std::move(done));
      done = nullptr;
    }
  }
  parts_.metrics->SetDraining(true);
  parking_.CloseAll(MakeError(absl::StatusCode::kUnavailable, "DRAINING", "the daemon is draining"));
  if (done) done();
}

void TransferManagerImpl::Shutdown() {
  std::vector<std::shared_ptr<Transfer>> running;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    draining_ = true;
    for (auto& [key, entry] : entries_) {
      if (entry.transfer != nullptr) running.push_back(entry.transfer);
    }
  }
  const absl::Status why = MakeError(absl::StatusCode::kUnavailable, "SHUTTING_DOWN", "the daemon is shutting down");
  parking_.CloseAll(why);
  for (auto& transfer : running) {
    Transfer* t = transfer.get();
    transfer->Post([t, why] { t->Fail(why); });
  }
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return untold_ == 0; });
}

std::shared_ptr<ControlListener> TransferManagerImpl::OnControl(std::shared_ptr<ControlStream> stream) {
  auto session = std::make_shared<ControlSession>(
      [this](std::shared_ptr<ControlSession> s, HelloFrame hello) { OnHello(std::move(s), std::move(hello)); },
      [this](const ControlSession* s, const absl::Status& status) {
        // Refused, broken or never joined: no transfer counts it.
        parking_.Forget(s);
        parts_.metrics->CountError(MetricStage::kQueue, status.code());
      });
  session->BindStream(std::move(stream));
  return session;
}

void TransferManagerImpl::OnHello(std::shared_ptr<ControlSession> session, HelloFrame hello) {
  const std::shared_ptr<ControlStream> stream = session->stream();
  if (stream == nullptr && !session->LastWords().has_value()) return;
  const Role ours = hello.role == Role::kSender ? Role::kReceiver : Role::kSender;
  absl::Status refusal;
  std::shared_ptr<Transfer> transfer;
  std::optional<Entry> late;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = entries_.find({ours, hello.transfer_id});
    if (hello.format_version != 1) {
      refusal = MakeError(absl::StatusCode::kUnimplemented, "UNSUPPORTED_VERSION",
                          absl::StrCat("chunk format version ", hello.format_version, ", this daemon speaks 1"));
    } else if (hello.part_index != 0 || hello.part_count != 1) {
      refusal = MakeError(absl::StatusCode::kUnimplemented, "PARTS_UNSUPPORTED", "this version moves one part");
    } else if (hello.expected_epoch != 0 && hello.expected_epoch != options_.epoch) {  // nobody brings our half again
      refusal = MakeError(absl::StatusCode::kFailedPrecondition, "PEER_RESTARTED",
                          "the peer daemon has restarted since the transfer began");
    } else if (it != entries_.end() && !ConstantTimeEqual(it->second.token, hello.transfer_token)) {
      refusal = MakeError(absl::StatusCode::kPermissionDenied, "TOKEN_MISMATCH",
                          "transfer_token is not that of the other half");
    } else if (it != entries_.end()) {
      transfer = it->second.transfer;
      if (transfer == nullptr) late = it->second;
    } else if (draining_) {
      refusal = MakeError(absl::StatusCode::kUnavailable, "DRAINING", "the daemon is draining");
    }
  }
  if (transfer != nullptr) {
    Transfer* t = transfer.get();
    return transfer->Post([t, session, hello = std::move(hello)] { t->Adopt(session, hello); });
  }
  if (late.has_value()) return AnswerLate(*late, ours, session.get());
  if (refusal.ok()) {
    refusal = parking_.Park(ours, session, hello, stream != nullptr ? stream->peer() : "");
    if (refusal.ok()) {
      // The half may have come between the look-up and the parking.
      std::unique_lock<std::mutex> lock(mutex_);
      const bool here = entries_.count({ours, hello.transfer_id}) > 0;
      lock.unlock();
      if (here) {
        for (Parking::Parked& parked : parking_.Take(ours, hello.transfer_id)) {
          OnHello(std::move(parked.session), std::move(parked.hello));
        }
      }
      return;
    }
  }
  if (stream != nullptr) stream->Close(refusal);
}

// Late callers get the outcome.
void TransferManagerImpl::AnswerLate(const Entry& entry, Role role, ControlSession* session) const {
  const std::shared_ptr<ControlStream> stream = session->stream();
  if (stream == nullptr) return;
  stream->Send(HelloReplyFrame{options_.epoch, 0, {}});
  const TransferReport& report = entry.report;
  const int32_t code = static_cast<int32_t>(report.error.code());
  const std::string message(report.error.message());
  if (role == Role::kReceiver) {
    ReceiptFrame receipt{report.state, code, ReasonOf(report.error), message, report.chunks, report.chunks_duplicate,
                         report.first_layer_ready_seconds};
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
  if (open.part_index != 0) return nullptr;  // a transfer has one part
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
  std::lock_guard<std::mutex> lock(mutex_);
  const Key key{transfer->role(), transfer->id()};
  Entry& entry = entries_.at(key);
  entry.report = transfer->Snapshot();
  entry.ended_ns = parts_.clock->NowNs();
  last = std::move(entry.transfer);
  entry.transfer = nullptr;
  ended_.push_back(key);
  --active_;
  if (--active_of_owner_[entry.owner] == 0) active_of_owner_.erase(entry.owner);
  if (--active_of_pool_[entry.pool_id] == 0) active_of_pool_.erase(entry.pool_id);
}

void TransferManagerImpl::OnDone() {
  parts_.metrics->AddInflightTransfers(-1);
  std::vector<std::function<void()>> drained;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--untold_ == 0) drained.swap(drained_);
    Forget();
    idle_.notify_all();
  }
  for (auto& done : drained) done();
}

void TransferManagerImpl::Forget() {
  const int64_t now = parts_.clock->NowNs();
  while (!ended_.empty()) {
    const auto it = entries_.find(ended_.front());
    const bool old = now - it->second.ended_ns > options_.terminal_memory_ms * kMsToNs;
    if (!old && ended_.size() <= options_.terminal_memory_count) return;
    entries_.erase(it);
    ended_.pop_front();
  }
}

}  // namespace spectrumkv
