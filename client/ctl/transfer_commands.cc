// transfers, transfers show, transfers cancel, transfers wait, transfers release, first-token.
#include "client/ctl/transfer_commands.h"

#include <cstdio>

#include "client/ctl/command.h"
#include "client/ctl/output.h"

namespace spectrumkv::ctl {
namespace {

const Flag kRole = {"role", "ROLE", "sender or receiver, where the daemon has both halves"};

v1::TransferKey Key(Args* args) {
  v1::TransferKey key;
  key.set_transfer_id(args->Positional(0, "a transfer id"));
  const std::string role = args->Text("role");
  if (role == "sender") key.set_role(v1::TRANSFER_ROLE_SENDER);
  if (role == "receiver") key.set_role(v1::TRANSFER_ROLE_RECEIVER);
  if (!role.empty() && key.role() == v1::TRANSFER_ROLE_UNSPECIFIED) args->Refuse("--role must be sender or receiver");
  return key;
}

absl::StatusOr<int> List(const Context& context, Args args) {
  v1::ListTransfersRequest request;
  request.set_limit(static_cast<uint32_t>(args.Number("limit", 0, 1, UINT32_MAX)));
  request.set_active_only(args.Switch("active"));
  if (const absl::Status status = args.Check(); !status.ok()) return status;
  const auto list = CallAdmin(context.connection, &AdminStub::ListTransfers, request);
  if (!list.ok()) return list.status();
  if (context.json) {
    std::fputs(ToJson(*list).c_str(), stdout);
    return kOk;
  }
  std::vector<std::vector<std::string>> rows = {
      {"TRANSFER", "ROLE", "STATE", "TOKENS", "KV", "WIRE", "TIME", "REASON"}};
  for (const v1::TransferReport& r : list->transfers()) {
    rows.push_back({r.transfer_id(), RoleName(r.role()), StateName(r.state()), std::to_string(r.tokens()),
                    Bytes(r.kv_bytes()), Bytes(r.wire_bytes()), Seconds(r.duration_seconds()), r.reason()});
  }
  std::fputs(Table(rows).c_str(), stdout);
  return kOk;
}

absl::StatusOr<int> Show(const Context& context, Args args) {
  const v1::TransferKey key = Key(&args);
  if (const absl::Status status = args.Check(1); !status.ok()) return status;
  const auto worker = ConnectWorker(context.connection);
  if (!worker.ok()) return worker.status();
  const auto report = (*worker)->Get(key);
  if (!report.ok()) return report.status();
  std::fputs(context.json ? ToJson(*report).c_str() : ReportLines(*report).c_str(), stdout);
  return kOk;
}

absl::StatusOr<int> Cancel(const Context& context, Args args) {
  const v1::TransferKey key = Key(&args);
  if (const absl::Status status = args.Check(1); !status.ok()) return status;
  const auto worker = ConnectWorker(context.connection);
  if (!worker.ok()) return worker.status();
  const auto report = (*worker)->Cancel(key);
  if (!report.ok()) return report.status();
  std::fputs(context.json ? ToJson(*report).c_str() : ReportLines(*report).c_str(), stdout);
  return report->state() == v1::TRANSFER_STATE_CANCELLED ? kOk : kCheckFailed;
}

absl::StatusOr<int> Wait(const Context& context, Args args) {
  const v1::TransferKey key = Key(&args);
  const bool exact = args.Switch("exact");
  if (const absl::Status status = args.Check(1); !status.ok()) return status;
  const auto worker = ConnectWorker(context.connection);
  if (!worker.ok()) return worker.status();
  if (exact) {
    const auto report = (*worker)->WaitExact(key, context.connection.timeout_ms);
    if (!report.ok()) return report.status();
    std::fputs(context.json ? ToJson(*report).c_str() : ReportLines(*report).c_str(), stdout);
    return report->exact() ? kOk : kCheckFailed;
  }
  return WaitAndReport(context, worker->get(), key);
}

absl::StatusOr<int> Release(const Context& context, Args args) {
  const v1::TransferKey key = Key(&args);
  const bool keep = args.Switch("keep-in-cache");
  if (const absl::Status status = args.Check(1); !status.ok()) return status;
  const auto worker = ConnectWorker(context.connection);
  if (!worker.ok()) return worker.status();
  if (!keep) {
    if (const absl::Status status = (*worker)->Release(key); !status.ok()) return status;
    if (context.json) std::puts("{}");
    return kOk;
  }
  const auto cached = (*worker)->ReleaseToCache(key);
  if (!cached.ok()) return cached.status();
  if (context.json) {
    std::printf("{\"kept_in_cache\": %s}\n", *cached ? "true" : "false");
  } else {
    std::puts(*cached ? "the daemon's cache has the words" : "released: the cache has no room, or nothing was retained");
  }
  return *cached ? kOk : kCheckFailed;
}

absl::StatusOr<int> FirstToken(const Context& context, Args args) {
  const v1::TransferKey key = Key(&args);
  args.Needed("seconds");
  const double seconds = args.Real("seconds", 0);
  if (const absl::Status status = args.Check(1); !status.ok()) return status;
  const auto worker = ConnectWorker(context.connection);
  if (!worker.ok()) return worker.status();
  if (const absl::Status status = (*worker)->ReportFirstToken(key, seconds); !status.ok()) return status;
  if (context.json) std::puts("{}");
  return kOk;
}

}  // namespace

absl::StatusOr<int> WaitAndReport(const Context& context, client::Client* worker, const v1::TransferKey& key) {
  const auto report = worker->Wait(key, context.connection.timeout_ms);
  if (!report.ok()) return report.status();
  std::fputs(context.json ? ToJson(*report).c_str() : ReportLines(*report).c_str(), stdout);
  return report->state() == v1::TRANSFER_STATE_COMMITTED ? kOk : kCheckFailed;
}

std::vector<Command> TransferCommands() {
  return {
      {"transfers",
       "",
       "transfers, newest first",
       {{"active", "", "only those that have not ended"}, {"limit", "N", "default 100"}},
       List},
      {"transfers show", "ID", "the report of a transfer", {kRole}, Show},
      {"transfers cancel",
       "ID",
       "cancel; returns when no byte can land any more; exit 1 if it had ended",
       {kRole},
       Cancel},
      {"transfers wait",
       "ID",
       "wait for the end (--timeout); exit 0 only if committed",
       {kRole, {"exact", "", "and until refinement is over; exit 0 only if the destination equals the source"}},
       Wait},
      {"transfers release",
       "ID",
       "end retention, withdraw a publish, forget what has ended; returns when no block is read or written any more",
       {kRole, {"keep-in-cache", "", "the daemon keeps a retained source's words (refine.cache_bytes); exit 1 if not"}},
       Release},
      {"first-token",
       "ID",
       "report the decode worker's time to first token",
       {kRole, {"seconds", "SECONDS", "time to first token"}},
       FirstToken},
  };
}

}  // namespace spectrumkv::ctl
