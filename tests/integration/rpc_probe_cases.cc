// Cases of ProbeService: a probe of the daemon's own, from its trials to the verdict.
#include <string>

#include "spectrumkv/v1/probe_service.grpc.pb.h"
#include "tests/integration/rpc_cases.h"

namespace spectrumkv {
namespace {

constexpr uint32_t kTargetBlock = 4;

class ProbeCases : public RpcCases {
 protected:
  ProbeCases() : probes_(v1::ProbeService::NewStub(ledger().Channel(decode().worker_target()))) {
    v1::RegisterPoolRequest request;
    request.set_request_id(NewTransferId("probed"));
    *request.mutable_schema() = SmallPool();
    request.mutable_schema()->set_model("probed-model");
    request.mutable_schema()->set_revision("r1");
    v1::RegisterPoolResponse response;
    EXPECT_RPC_OK(decode_worker().RegisterPool(Context().get(), request, &response));
    pool_ = response.pool();
    Fill(decode_worker(), pool_, 5);
  }

  v1::StartProbeRequest StartOf(v1::Tier tier) const {
    v1::StartProbeRequest request;
    *request.mutable_pool() = pool_;
    request.add_tiers(tier);
    return request;
  }

  // A transfer from the pool's first blocks to others of it, through the daemon itself.
  std::string RoundTrip(const std::string& peer, v1::Tier tier) {
    const std::string id = NewTransferId("trial");
    v1::ExpectRequest expect = ExpectOf(pool_, id);
    expect.mutable_blocks(0)->mutable_runs(0)->set_first(kTargetBlock);
    v1::ExpectResponse expected;
    EXPECT_RPC_OK(decode_worker().Expect(Context().get(), expect, &expected));
    v1::SendRequest send = SendOf(pool_, id, peer);
    send.mutable_policy()->Clear();
    send.mutable_policy()->set_allocator(v1::ALLOCATOR_UNIFORM);
    send.mutable_policy()->set_uniform_tier(tier);
    v1::SendResponse sent;
    EXPECT_RPC_OK(decode_worker().Send(Context().get(), send, &sent));
    for (const v1::TransferRole role : {v1::TRANSFER_ROLE_RECEIVER, v1::TRANSFER_ROLE_SENDER}) {
      v1::WatchTransferRequest watch;
      watch.mutable_transfer()->set_transfer_id(id);
      watch.mutable_transfer()->set_role(role);
      const auto context = Context();
      const auto reader = decode_worker().WatchTransfer(context.get(), watch);
      v1::WatchTransferResponse event;
      while (reader->Read(&event)) {
        if (event.has_terminal()) {
          EXPECT_EQ(event.terminal().state(), v1::TRANSFER_STATE_COMMITTED) << event.terminal().message();
        }
      }
      EXPECT_RPC_OK(reader->Finish());
    }
    return id;
  }

  // A worker whose model has read everything.
  v1::TrialResult Passed(const v1::StartProbeResponse& probe, const v1::Trial& trial, v1::Tier tier) {
    v1::TrialResult result;
    result.set_trial_id(trial.trial_id());
    result.set_tier(tier);
    result.set_transfer_id(RoundTrip(probe.peer(), tier));
    if (trial.kind() == v1::TRIAL_KIND_NEEDLE) {
      result.set_answer(trial.prompt().substr(trial.prompt().find_first_of("0123456789"), trial.answer_characters()));
    } else {
      result.mutable_agreement()->set_positions(50);
      result.mutable_agreement()->set_agreed(45);
    }
    return result;
  }

  std::unique_ptr<v1::ProbeService::Stub> probes_;
  v1::PoolRef pool_;
};

TEST_F(ProbeCases, AProbeToItsVerdict) {
  v1::StartProbeResponse probe;
  EXPECT_REFUSED(probes_->StartProbe(Context().get(), StartOf(v1::TIER_RAW), &probe), INVALID_ARGUMENT,
                 "INVALID_TIERS");
  EXPECT_RPC_OK(probes_->StartProbe(Context().get(), StartOf(v1::TIER_Q4), &probe));
  ASSERT_EQ(probe.trials_size(), 9);

  v1::ReportTrialsRequest report;
  report.set_probe_id(probe.probe_id());
  v1::ReportTrialsResponse reported;
  EXPECT_REFUSED(probes_->ReportTrials(Context().get(), report, &reported), INVALID_ARGUMENT, "INVALID_TRIAL");
  for (const v1::Trial& trial : probe.trials()) *report.add_results() = Passed(probe, trial, v1::TIER_Q4);
  EXPECT_RPC_OK(probes_->ReportTrials(Context().get(), report, &reported));
  ASSERT_EQ(reported.verdicts_size(), 1);
  EXPECT_TRUE(reported.verdicts(0).open());
  EXPECT_EQ(reported.verdicts(0).tier(), v1::TIER_Q4);
  EXPECT_EQ(reported.verdicts(0).scores(2).passed(), 3u);

  v1::ListVerdictsRequest list;
  list.set_model("probed-model");
  v1::ListVerdictsResponse listed;
  EXPECT_RPC_OK(probes_->ListVerdicts(Context().get(), list, &listed));
  ASSERT_EQ(listed.verdicts_size(), 1);
  EXPECT_EQ(listed.verdicts(0).revision(), "r1");
  list.set_model(std::string(300, 'm'));
  EXPECT_REFUSED(probes_->ListVerdicts(Context().get(), list, &listed), INVALID_ARGUMENT, "OUT_OF_RANGE");

  v1::DeleteVerdictsRequest forget;
  v1::DeleteVerdictsResponse forgotten;
  EXPECT_REFUSED(probes_->DeleteVerdicts(Context().get(), forget, &forgotten), INVALID_ARGUMENT, "INVALID_MODEL");
  forget.set_model("probed-model");
  EXPECT_RPC_OK(probes_->DeleteVerdicts(Context().get(), forget, &forgotten));
  EXPECT_EQ(forgotten.deleted(), 1u);
}

}  // namespace
}  // namespace spectrumkv
