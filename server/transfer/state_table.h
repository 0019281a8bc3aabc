// The life of a transfer as data: (role, state, event) -> (state, action). Source: docs/architecture.md, "Life of a
// transfer". Every pair is written out; a test walks them all.
#pragma once

#include <cstddef>

#include "server/stream/frames.h"

namespace spectrumkv {

enum class Event : unsigned char {
  kPeerJoined,    // handshake done: Accept was sent or received
  kDataStarted,   // sender: first chunk handed to the network; receiver: first chunk arrived
  kDataComplete,  // sender: last chunk handed to the network; receiver: coverage full
  kCommit,        // receiver: commit done; sender: receipt says COMMITTED
  kFail,          // something broke here
  kCancel,        // the worker asks
  kExpire,        // deadline
  kPeerFailed,    // the peer ended it
  kPeerCancelled,
  kPeerExpired,
};
constexpr size_t kEventCount = 10;

enum class Action : unsigned char {
  kNone,            // only the state changes
  kIgnore,          // nothing happens
  kResume,          // a new attempt joined: go on with what is missing
  kAwaitReceipt,    // sender: all is sent, the receiver decides
  kStartCommit,     // receiver: tails, health, then kCommit
  kAskPeer,         // sender: only the receiver knows whether it committed; ask it to cancel
  kTerminate,       // close the gate, tell the peer, settle
  kOutcomeUnknown,  // sender: end as FAILED with OUTCOME_UNKNOWN
  kBug,             // cannot happen
};

struct Transition {
  TransferState next;
  Action action;
};

// REQUIRES: valid enum values.
Transition NextState(Role role, TransferState state, Event event);

const char* StateName(TransferState state);
const char* EventName(Event event);

}  // namespace spectrumkv
