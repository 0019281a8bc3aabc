// The calls of WorkerService, one function each. Internal to server/service. Requests and responses belong to gRPC and
// live until the reactor has finished.
#pragma once

#include <functional>

#include "server/base/executor.h"
#include "server/service/plan_call.h"
#include "server/service/service_context.h"
#include "spectrumkv/v1/worker_service.grpc.pb.h"

namespace spectrumkv {

using CallContext = grpc::CallbackServerContext;
using UnaryReactor = grpc::ServerUnaryReactor;

// Runs `work` on context->calls and answers with what it returns.
UnaryReactor* RunCall(const ServiceContext* context, CallContext* call, std::function<absl::Status()> work);

// worker_pools.cc
// `registers`: one after the other, as they map under one lock; on all threads of context->calls they would hold up others.
UnaryReactor* RegisterPool(const ServiceContext*, CallContext*, const v1::RegisterPoolRequest*, v1::RegisterPoolResponse*,
                           Strand* registers);
UnaryReactor* RenewLease(const ServiceContext*, CallContext*, const v1::RenewLeaseRequest*, v1::RenewLeaseResponse*);
UnaryReactor* UnregisterPool(const ServiceContext*, CallContext*, const v1::UnregisterPoolRequest*);
UnaryReactor* PlanTransfer(const ServiceContext*, CallContext*, const v1::PlanRequest*, v1::PlanResponse*, PlanPlaces*);

// worker_hold.cc
grpc::ServerBidiReactor<v1::HoldPoolRequest, v1::HoldPoolResponse>* HoldPool(const ServiceContext*, CallContext*);

// worker_blocks.cc
grpc::ServerReadReactor<v1::PutBlocksRequest>* PutBlocks(const ServiceContext*, CallContext*, v1::PutBlocksResponse*);
grpc::ServerWriteReactor<v1::GetBlocksResponse>* GetBlocks(const ServiceContext*, CallContext*,
                                                           const v1::GetBlocksRequest*);

// worker_transfers.cc
UnaryReactor* SendTransfer(const ServiceContext*, CallContext*, const v1::SendRequest*, v1::SendResponse*);
UnaryReactor* PublishTransfer(const ServiceContext*, CallContext*, const v1::PublishRequest*, v1::PublishResponse*);
UnaryReactor* ExpectTransfer(const ServiceContext*, CallContext*, const v1::ExpectRequest*, v1::ExpectResponse*);
UnaryReactor* FetchTransfer(const ServiceContext*, CallContext*, const v1::FetchRequest*, v1::FetchResponse*);
UnaryReactor* AdvanceTransfer(const ServiceContext*, CallContext*, const v1::AdvanceRequest*);
UnaryReactor* GetTransfer(const ServiceContext*, CallContext*, const v1::GetTransferRequest*, v1::GetTransferResponse*);
UnaryReactor* CancelTransfer(const ServiceContext*, CallContext*, const v1::CancelTransferRequest*,
                             v1::CancelTransferResponse*);
UnaryReactor* ReleaseTransfer(const ServiceContext*, CallContext*, const v1::ReleaseTransferRequest*,
                              v1::ReleaseTransferResponse*);
UnaryReactor* RefineTransfer(const ServiceContext*, CallContext*, const v1::RefineRequest*, v1::RefineResponse*);
UnaryReactor* ApplyRefinement(const ServiceContext*, CallContext*, const v1::ApplyRefinementRequest*,
                              v1::ApplyRefinementResponse*);
UnaryReactor* ReportFirstToken(const ServiceContext*, CallContext*, const v1::ReportFirstTokenRequest*);

// worker_watch.cc
grpc::ServerWriteReactor<v1::WatchTransferResponse>* WatchTransfer(const ServiceContext*, CallContext*,
                                                                   const v1::WatchTransferRequest*);

// CheckTransferId and RoleFromProto of a key.
absl::StatusOr<std::optional<Role>> RoleOfKey(const v1::TransferKey& key);

}  // namespace spectrumkv
