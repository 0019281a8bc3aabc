#include "server/transfer/state_table.h"

namespace spectrumkv {
namespace {

using S = TransferState;
using A = Action;
constexpr S W = S::kWaiting, P = S::kPlanned, D = S::kStreaming, V = S::kVerifying, C = S::kCommitted, F = S::kFailed,
            X = S::kCancelled, E = S::kExpired;
constexpr size_t kStateCount = 8;
using Row = Transition[kEventCount];

// Columns: joined, started, complete, commit, fail, cancel, expire, peer failed, peer cancelled, peer expired.
// A sender learns the outcome of a lost receipt in VERIFYING only: before that the receiver cannot have committed.
constexpr Row kSender[kStateCount] = {
    /* WAITING   */ {{P, A::kNone}, {W, A::kBug}, {W, A::kBug}, {W, A::kBug}, {F, A::kTerminate}, {X, A::kTerminate},
                     {E, A::kTerminate}, {F, A::kTerminate}, {X, A::kTerminate}, {E, A::kTerminate}},
    /* PLANNED   */ {{P, A::kResume}, {D, A::kNone}, {P, A::kBug}, {P, A::kBug}, {F, A::kTerminate}, {X, A::kTerminate},
                     {E, A::kTerminate}, {F, A::kTerminate}, {X, A::kTerminate}, {E, A::kTerminate}},
    /* STREAMING */ {{D, A::kResume}, {D, A::kIgnore}, {V, A::kAwaitReceipt}, {D, A::kBug}, {F, A::kTerminate},
                     {X, A::kTerminate}, {E, A::kTerminate}, {F, A::kTerminate}, {X, A::kTerminate},
                     {E, A::kTerminate}},
    /* VERIFYING */ {{V, A::kResume}, {V, A::kIgnore}, {V, A::kIgnore}, {C, A::kTerminate}, {F, A::kOutcomeUnknown},
                     {V, A::kAskPeer}, {F, A::kOutcomeUnknown}, {F, A::kTerminate}, {X, A::kTerminate},
                     {E, A::kTerminate}},
    /* COMMITTED */ {{C, A::kIgnore}, {C, A::kIgnore}, {C, A::kIgnore}, {C, A::kIgnore}, {C, A::kIgnore},
                     {C, A::kIgnore}, {C, A::kIgnore}, {C, A::kIgnore}, {C, A::kIgnore}, {C, A::kIgnore}},
    /* FAILED    */ {{F, A::kIgnore}, {F, A::kIgnore}, {F, A::kIgnore}, {F, A::kIgnore}, {F, A::kIgnore},
                     {F, A::kIgnore}, {F, A::kIgnore}, {F, A::kIgnore}, {F, A::kIgnore}, {F, A::kIgnore}},
    /* CANCELLED */ {{X, A::kIgnore}, {X, A::kIgnore}, {X, A::kIgnore}, {X, A::kIgnore}, {X, A::kIgnore},
                     {X, A::kIgnore}, {X, A::kIgnore}, {X, A::kIgnore}, {X, A::kIgnore}, {X, A::kIgnore}},
    /* EXPIRED   */ {{E, A::kIgnore}, {E, A::kIgnore}, {E, A::kIgnore}, {E, A::kIgnore}, {E, A::kIgnore},
                     {E, A::kIgnore}, {E, A::kIgnore}, {E, A::kIgnore}, {E, A::kIgnore}, {E, A::kIgnore}},
};

// The receiver's commit is the truth: until kCommit every ending is its own to choose.
constexpr Row kReceiver[kStateCount] = {
    /* WAITING   */ {{P, A::kNone}, {W, A::kBug}, {W, A::kBug}, {W, A::kBug}, {F, A::kTerminate}, {X, A::kTerminate},
                     {E, A::kTerminate}, {F, A::kTerminate}, {X, A::kTerminate}, {E, A::kTerminate}},
    /* PLANNED   */ {{P, A::kResume}, {D, A::kNone}, {P, A::kBug}, {P, A::kBug}, {F, A::kTerminate}, {X, A::kTerminate},
                     {E, A::kTerminate}, {F, A::kTerminate}, {X, A::kTerminate}, {E, A::kTerminate}},
    /* STREAMING */ {{D, A::kResume}, {D, A::kIgnore}, {V, A::kStartCommit}, {D, A::kBug}, {F, A::kTerminate},
                     {X, A::kTerminate}, {E, A::kTerminate}, {F, A::kTerminate}, {X, A::kTerminate},
                     {E, A::kTerminate}},
    /* VERIFYING */ {{V, A::kResume}, {V, A::kIgnore}, {V, A::kIgnore}, {C, A::kTerminate}, {F, A::kTerminate},
                     {X, A::kTerminate}, {E, A::kTerminate}, {F, A::kTerminate}, {X, A::kTerminate},
                     {E, A::kTerminate}},
    /* COMMITTED */ {{C, A::kIgnore}, {C, A::kIgnore}, {C, A::kIgnore}, {C, A::kIgnore}, {C, A::kIgnore},
                     {C, A::kIgnore}, {C, A::kIgnore}, {C, A::kIgnore}, {C, A::kIgnore}, {C, A::kIgnore}},
    /* FAILED    */ {{F, A::kIgnore}, {F, A::kIgnore}, {F, A::kIgnore}, {F, A::kIgnore}, {F, A::kIgnore},
                     {F, A::kIgnore}, {F, A::kIgnore}, {F, A::kIgnore}, {F, A::kIgnore}, {F, A::kIgnore}},
    /* CANCELLED */ {{X, A::kIgnore}, {X, A::kIgnore}, {X, A::kIgnore}, {X, A::kIgnore}, {X, A::kIgnore},
                     {X, A::kIgnore}, {X, A::kIgnore}, {X, A::kIgnore}, {X, A::kIgnore}, {X, A::kIgnore}},
    /* EXPIRED   */ {{E, A::kIgnore}, {E, A::kIgnore}, {E, A::kIgnore}, {E, A::kIgnore}, {E, A::kIgnore},
                     {E, A::kIgnore}, {E, A::kIgnore}, {E, A::kIgnore}, {E, A::kIgnore}, {E, A::kIgnore}},
};

}  // namespace

Transition NextState(Role role, TransferState state, Event event) {
  const Row* table = role == Role::kSender ? kSender : kReceiver;
  return table[static_cast<size_t>(state) - 1][static_cast<size_t>(event)];
}

const char* StateName(TransferState state) {
  static const char* const kNames[] = {"?",         "WAITING",   "PLANNED", "STREAMING", "VERIFYING",
                                       "COMMITTED", "FAILED",    "CANCELLED", "EXPIRED"};
  return kNames[static_cast<size_t>(state)];
}

const char* EventName(Event event) {
  static const char* const kNames[kEventCount] = {"peer_joined", "data_started", "data_complete", "commit", "fail",
                                                  "cancel", "expire", "peer_failed", "peer_cancelled", "peer_expired"};
  return kNames[static_cast<size_t>(event)];
}

}  // namespace spectrumkv
