// plan, send, publish, expect, fetch.
#include <cstdio>

#include "client/cpp/blocks.h"
#include "client/ctl/output.h"
#include "client/ctl/policy_flags.h"
#include "client/ctl/pool_commands.h"
#include "client/ctl/transfer_commands.h"

namespace spectrumkv::ctl {
namespace {

using Worker = v1::WorkerService::Stub;

std::vector<Flag> Join(const std::vector<std::vector<Flag>>& groups) {
  std::vector<Flag> flags;
  for (const auto& group : groups) flags.insert(flags.end(), group.begin(), group.end());
  return flags;
}

std::vector<Flag> BlockFlags() {
  return Join({PoolFlags(),
               {{"blocks", "IDS", "blocks of the request in token order, as 0-15,20"},
                {"tokens", "N", "tokens of the request"},
                {"skip", "N", "tokens of the first block that are there already; neither sent nor touched"},
                {"group", "N", "layer group of the pool; default 0"}}});
}

std::vector<Flag> TransferFlags() {
  return {{"transfer", "ID", "chosen by you, the same on both sides"},
          {"token", "HEX", "16 bytes that both sides must give"},
          {"deadline", "SECONDS", "default the daemon's"},
          {"part", "I/N", "one of several pools that arrive together: part I, from 0, of N; a call for each on both sides"},
          {"wait", "", "wait for the end (--timeout); exit 0 only if committed"}};
}

const Flag kPeer = {"peer", "HOST:PORT", "the other daemon"};

std::vector<Flag> DestinationFlags() {
  return {{"accept-dropped", "", "the source may drop tokens"},
          {"exact", "", "refuse a source that needs rounding"},
          {"refinable", "", "transfers refine will ask for better precision of what arrives"}};
}

// What all these requests have.
template <typename Request>
absl::Status ReadBlocks(const Context& context, Args* args, Request* request) {
  request->set_token_count(static_cast<uint32_t>(args->Number("tokens", 0, 1, UINT32_MAX)));
  args->Needed("tokens");
  *request->add_blocks() =
      client::Blocks(static_cast<uint32_t>(args->Number("group", 0, 0, 1023)), args->Ids("blocks"));
  request->mutable_blocks(0)->set_skip_tokens(static_cast<uint32_t>(args->Number("skip", 0, 0, 255)));
  args->Needed("pool");
  if (const absl::Status status = args->Check(); !status.ok()) return status;
  const auto pool = ReadPool(context, args);
  if (!pool.ok()) return pool.status();
  *request->mutable_pool() = *pool;
  return args->Check();
}

template <typename Request>
void ReadTransfer(Args* args, Request* request) {
  request->set_transfer_id(args->Needed("transfer"));
  request->set_transfer_token(args->Hex("token"));
  request->set_deadline_ms(static_cast<uint64_t>(args->Milliseconds("deadline", 0)));
  if (!args->Has("part")) return;
  const std::string part = args->Text("part");
  unsigned index = 0, count = 0;
  int end = 0;
  if (std::sscanf(part.c_str(), "%2u/%2u%n", &index, &count, &end) != 2 || part.size() != static_cast<size_t>(end)) {
    args->Refuse("--part must be as 0/2");
  }
  request->mutable_part()->set_index(index);
  request->mutable_part()->set_count(count);
}

// Calls, then waits where --wait says so.
template <typename Request, typename Response>
absl::StatusOr<int> Begin(const Context& context, const Args& args, v1::TransferRole role, const Request& request,
                          grpc::Status (Worker::*method)(grpc::ClientContext*, const Request&, Response*)) {
  const auto worker = ConnectWorker(context.connection);
  if (!worker.ok()) return worker.status();
  const auto response = CallWorkerPatiently(worker->get(), context.connection, method, request);
  if (!response.ok()) return response.status();
  if (args.Switch("wait")) {
    v1::TransferKey key;
    key.set_transfer_id(request.transfer_id());
    key.set_role(role);
    return WaitAndReport(context, worker->get(), key);
  }
  if (context.json) {
    std::fputs(ToJson(*response).c_str(), stdout);
  } else {
    std::printf("accepted; spectrumkvctl transfers wait %s\n", request.transfer_id().c_str());
  }
  return kOk;
}

absl::StatusOr<int> Send(const Context& context, Args args) {
  v1::SendRequest request;
  ReadTransfer(&args, &request);
  request.set_peer(args.Needed("peer"));
  *request.mutable_policy() = ReadPolicy(&args);
  if (const absl::Status status = ReadBlocks(context, &args, &request); !status.ok()) return status;
  return Begin(context, args, v1::TRANSFER_ROLE_SENDER, request, &Worker::Send);
}

absl::StatusOr<int> Publish(const Context& context, Args args) {
  v1::PublishRequest request;
  ReadTransfer(&args, &request);
  *request.mutable_policy() = ReadPolicy(&args);
  if (const absl::Status status = ReadBlocks(context, &args, &request); !status.ok()) return status;
  return Begin(context, args, v1::TRANSFER_ROLE_SENDER, request, &Worker::Publish);
}

template <typename Request>
void ReadDestination(const Args& args, Request* request) {
  request->set_accept_dropped(args.Switch("accept-dropped"));
  request->set_exact_conversion(args.Switch("exact"));
  request->set_refinable(args.Switch("refinable"));
}

absl::StatusOr<int> Expect(const Context& context, Args args) {
  v1::ExpectRequest request;
  ReadTransfer(&args, &request);
  ReadDestination(args, &request);
  if (const absl::Status status = ReadBlocks(context, &args, &request); !status.ok()) return status;
  return Begin(context, args, v1::TRANSFER_ROLE_RECEIVER, request, &Worker::Expect);
}

absl::StatusOr<int> Fetch(const Context& context, Args args) {
  v1::FetchRequest request;
  ReadTransfer(&args, &request);
  request.set_peer(args.Needed("peer"));
  ReadDestination(args, &request);
  if (const absl::Status status = ReadBlocks(context, &args, &request); !status.ok()) return status;
  return Begin(context, args, v1::TRANSFER_ROLE_RECEIVER, request, &Worker::Fetch);
}

std::string PredictedTime(const v1::PlanResponse& plan) {
  if (plan.has_predicted_seconds()) {
    return Seconds(plan.predicted_seconds()) + " (predicted, at " + Rate(plan.link_bytes_per_second()) + ", limited by " +
           LimitName(plan.predicted_limited_by()) + ")";
  }
  return plan.prediction_missing() == "NO_LINK_ASKED" ? "" : "not known: " + plan.prediction_missing();
}

absl::StatusOr<int> Plan(const Context& context, Args args) {
  v1::PlanRequest request;
  *request.mutable_policy() = ReadPolicy(&args);
  request.set_peer(args.Text("peer"));
  if (args.Has("link-rate")) request.set_link_bytes_per_second(args.Real("link-rate", 0));
  if (const absl::Status status = ReadBlocks(context, &args, &request); !status.ok()) return status;
  const auto worker = ConnectWorker(context.connection);
  if (!worker.ok()) return worker.status();
  const auto plan = CallWorker(worker->get(), context.connection, &Worker::Plan, request);
  if (!plan.ok()) return plan.status();
  if (context.json) {
    std::fputs(ToJson(*plan).c_str(), stdout);
    return kOk;
  }
  uint64_t dropped = 0;
  for (const v1::TokenRun& run : plan->dropped_tokens()) dropped += run.count();
  std::fputs(Lines({{"KV bytes", Bytes(plan->kv_bytes())},
                    {"wire bytes", Bytes(plan->wire_bytes()) + " (" + Percent(plan->budget_used()) + ")"},
                    {"bits per value", Real(plan->bits_per_value(), 2)},
                    {"tiers (K/V)", Tiers(plan->tiers())},
                    {"dropped tokens", dropped == 0 ? "" : std::to_string(dropped)},
                    {"escaped", plan->escaped_tokens() == 0 ? "" : std::to_string(plan->escaped_tokens())},
                    {"least budget", Real(plan->least_budget(), 4)},
                    {"budget choice", plan->has_budget_choice() ? Choice(plan->budget_choice()) : ""},
                    {"time", PredictedTime(*plan)},
                    {"distortion", Real(plan->predicted_distortion(), 6) + " (predicted)"}})
                 .c_str(),
             stdout);
  return kOk;
}

}  // namespace

std::vector<Command> SendCommands() {
  return {
      {"plan", "", "what send would do: tiers, exact wire bytes; with --peer or --link-rate, how long it would take",
       Join({BlockFlags(),
             {{"peer", "HOST:PORT", "the peer whose measured link the time is predicted for"},
              {"link-rate", "BYTES", "a link of so many bytes a second to predict the time for, as 1.25e8"}},
             PolicyFlags()}),
       Plan},
      {"send", "", "push blocks to a peer that expects them",
       Join({{kPeer}, TransferFlags(), BlockFlags(), PolicyFlags()}), Send},
      {"expect", "", "reserve blocks for a push", Join({TransferFlags(), BlockFlags(), DestinationFlags()}), Expect},
      {"publish", "", "hold blocks until a peer fetches them", Join({TransferFlags(), BlockFlags(), PolicyFlags()}),
       Publish},
      {"fetch", "", "pull blocks that a peer has published",
       Join({{kPeer}, TransferFlags(), BlockFlags(), DestinationFlags()}), Fetch},
  };
}

}  // namespace spectrumkv::ctl
