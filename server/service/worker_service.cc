#include "server/service/worker_service.h"

#include "server/service/worker_calls.h"

namespace spectrumkv {
namespace {

class WorkerServiceImpl final : public v1::WorkerService::CallbackService {
 public:
  explicit WorkerServiceImpl(const ServiceContext* context) : context_(context) {}

  UnaryReactor* RegisterPool(CallContext* call, const v1::RegisterPoolRequest* request,
                             v1::RegisterPoolResponse* response) override {
    return spectrumkv::RegisterPool(context_, call, request, response, &registers_);
  }
  grpc::ServerBidiReactor<v1::HoldPoolRequest, v1::HoldPoolResponse>* HoldPool(CallContext* call) override {
    return spectrumkv::HoldPool(context_, call);
  }
  UnaryReactor* RenewLease(CallContext* call, const v1::RenewLeaseRequest* request,
                           v1::RenewLeaseResponse* response) override {
    return spectrumkv::RenewLease(context_, call, request, response);
  }
  UnaryReactor* UnregisterPool(CallContext* call, const v1::UnregisterPoolRequest* request,
                               v1::UnregisterPoolResponse*) override {
    return spectrumkv::UnregisterPool(context_, call, request);
  }
  grpc::ServerReadReactor<v1::PutBlocksRequest>* PutBlocks(CallContext* call,
                                                           v1::PutBlocksResponse* response) override {
    return spectrumkv::PutBlocks(context_, call, response);
  }
  grpc::ServerWriteReactor<v1::GetBlocksResponse>* GetBlocks(CallContext* call,
                                                             const v1::GetBlocksRequest* request) override {
    return spectrumkv::GetBlocks(context_, call, request);
  }
  UnaryReactor* Plan(CallContext* call, const v1::PlanRequest* request, v1::PlanResponse* response) override {
    return PlanTransfer(context_, call, request, response, &plans_);
  }
  UnaryReactor* Send(CallContext* call, const v1::SendRequest* request, v1::SendResponse* response) override {
    return SendTransfer(context_, call, request, response);
  }
  UnaryReactor* Publish(CallContext* call, const v1::PublishRequest* request, v1::PublishResponse* response) override {
    return PublishTransfer(context_, call, request, response);
  }
  UnaryReactor* Advance(CallContext* call, const v1::AdvanceRequest* request, v1::AdvanceResponse*) override {
    return AdvanceTransfer(context_, call, request);
  }
  UnaryReactor* Expect(CallContext* call, const v1::ExpectRequest* request, v1::ExpectResponse* response) override {
    return ExpectTransfer(context_, call, request, response);
  }
  UnaryReactor* Fetch(CallContext* call, const v1::FetchRequest* request, v1::FetchResponse* response) override {
    return FetchTransfer(context_, call, request, response);
  }
  grpc::ServerWriteReactor<v1::WatchTransferResponse>* WatchTransfer(CallContext* call,
                                                                     const v1::WatchTransferRequest* request) override {
    return spectrumkv::WatchTransfer(context_, call, request);
  }
  UnaryReactor* GetTransfer(CallContext* call, const v1::GetTransferRequest* request,
                            v1::GetTransferResponse* response) override {
    return spectrumkv::GetTransfer(context_, call, request, response);
  }
  UnaryReactor* CancelTransfer(CallContext* call, const v1::CancelTransferRequest* request,
                               v1::CancelTransferResponse* response) override {
    return spectrumkv::CancelTransfer(context_, call, request, response);
  }
  UnaryReactor* ReleaseTransfer(CallContext* call, const v1::ReleaseTransferRequest* request,
                                v1::ReleaseTransferResponse* response) override {
    return spectrumkv::ReleaseTransfer(context_, call, request, response);
  }
  UnaryReactor* Refine(CallContext* call, const v1::RefineRequest* request, v1::RefineResponse* response) override {
    return RefineTransfer(context_, call, request, response);
  }
  UnaryReactor* ApplyRefinement(CallContext* call, const v1::ApplyRefinementRequest* request,
                                v1::ApplyRefinementResponse* response) override {
    return spectrumkv::ApplyRefinement(context_, call, request, response);
  }
  UnaryReactor* ReportFirstToken(CallContext* call, const v1::ReportFirstTokenRequest* request,
                                 v1::ReportFirstTokenResponse*) override {
    return spectrumkv::ReportFirstToken(context_, call, request);
  }

 private:
  const ServiceContext* const context_;
  PlanPlaces plans_;
  Strand registers_{context_->calls};
};

}  // namespace

std::unique_ptr<grpc::Service> NewWorkerService(const ServiceContext* context) {
  return std::make_unique<WorkerServiceImpl>(context);
}

UnaryReactor* RunCall(const ServiceContext* context, CallContext* call, std::function<absl::Status()> work) {
  UnaryReactor* reactor = call->DefaultReactor();
  context->calls->Post(
      [context, reactor, work = std::move(work)] { reactor->Finish(EndOf(*context, MetricStage::kQueue, work())); });
  return reactor;
}

}  // namespace spectrumkv
