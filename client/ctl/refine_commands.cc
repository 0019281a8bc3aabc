// transfers refine, transfers apply.
#include <cstdio>

#include "client/ctl/command.h"
#include "client/ctl/output.h"
#include "client/ctl/policy_flags.h"
#include "client/ctl/transfer_commands.h"

namespace spectrumkv::ctl {
namespace {

int PrintApplied(const Context& context, const v1::ApplyRefinementResponse& applied) {
  if (context.json) {
    std::fputs(ToJson(applied).c_str(), stdout);
  } else {
    std::fputs(Lines({{"applied", Bytes(applied.applied_bytes())},
                      {"staged", Bytes(applied.staged_bytes())},
                      {"stale cells", applied.stale_cells() == 0 ? "" : std::to_string(applied.stale_cells())},
                      {"complete", applied.complete() ? "yes" : "no"}})
                   .c_str(),
               stdout);
  }
  return applied.complete() ? kOk : kCheckFailed;
}

absl::StatusOr<int> Refine(const Context& context, Args args) {
  v1::RefineRequest request;
  request.set_transfer_id(args.Positional(0, "a transfer id"));
  request.set_refine_id(args.Text("refine-id", request.transfer_id() + ".refined"));
  request.set_peer(args.Text("peer"));
  if (args.Has("tier")) request.set_tier(ReadTier(args.Text("tier"), &args));
  if (args.Has("budget")) request.set_budget(args.Real("budget", 0));
  if (args.Has("layers")) {
    for (const uint64_t layer : args.Ids("layers", UINT32_MAX)) {
      request.mutable_selection()->add_layers(static_cast<uint32_t>(layer));
    }
  }
  if (args.Has("first") || args.Has("count")) {
    v1::TokenRun* const run = request.mutable_selection()->add_tokens();
    run->set_first(static_cast<uint32_t>(args.Number("first", 0, 0, UINT32_MAX)));
    run->set_count(static_cast<uint32_t>(args.Number("count", 0, 1, UINT32_MAX)));
    args.Needed("count");
  }
  if (args.Switch("direct")) request.set_mode(v1::REFINE_MODE_DIRECT);
  request.set_deadline_ms(static_cast<uint64_t>(args.Milliseconds("deadline", 0)));
  if (const absl::Status status = args.Check(1); !status.ok()) return status;
  const auto worker = ConnectWorker(context.connection);
  if (!worker.ok()) return worker.status();
  const auto started = (*worker)->Refine(request);
  if (!started.ok()) return started.status();
  if (started->cells() == 0 || !args.Switch("wait")) {
    if (context.json) {
      std::fputs(ToJson(*started).c_str(), stdout);
    } else {
      std::fputs(Lines({{"refinement", started->cells() == 0 ? "nothing to gain" : request.refine_id()},
                        {"cells", std::to_string(started->cells())},
                        {"left", std::to_string(started->cells_left())},
                        {"KV bytes", Bytes(started->kv_bytes())}})
                     .c_str(),
                 stdout);
    }
    return kOk;
  }
  v1::TransferKey key;
  key.set_transfer_id(request.refine_id());
  key.set_role(v1::TRANSFER_ROLE_RECEIVER);
  return WaitAndReport(context, worker->get(), key);
}

absl::StatusOr<int> Apply(const Context& context, Args args) {
  const std::string refine_id = args.Positional(0, "the id of a refinement");
  const uint64_t max_bytes = args.Number("max-bytes", 0, 0, UINT64_MAX);
  if (const absl::Status status = args.Check(1); !status.ok()) return status;
  const auto worker = ConnectWorker(context.connection);
  if (!worker.ok()) return worker.status();
  const auto applied = (*worker)->ApplyRefinement(refine_id, max_bytes);
  if (!applied.ok()) return applied.status();
  return PrintApplied(context, *applied);
}

}  // namespace

std::vector<Command> RefineCommands() {
  return {
      {"transfers refine",
       "ID",
       "ask for better precision of what has arrived (expect or fetch --refinable, send or publish --retain)",
       {{"refine-id", "ID", "of the refinement, a transfer of its own; default ID.refined"},
        {"peer", "HOST:PORT", "where the source is; default where the transfer came from"},
        {"tier", "TIER", "what the cells are to have; default RAW"},
        {"budget", "SHARE", "of the raw KV bytes that may cross"},
        {"layers", "LIST", "as 0-3,7; default all"},
        {"first", "N", "first token; default 0"},
        {"count", "N", "tokens; default all"},
        {"direct", "", "into the blocks as they arrive, not into staging"},
        {"deadline", "SECONDS", "default the daemon's"},
        {"wait", "", "wait for the end, print the report"}},
       Refine},
      {"transfers apply",
       "ID",
       "copy what a refinement has staged into the blocks; exit 1 while there is more to come",
       {{"max-bytes", "N", "at most so many; default all"}},
       Apply},
  };
}

}  // namespace spectrumkv::ctl
