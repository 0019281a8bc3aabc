// Both halves of transfers as the state table lets them live, in random walks: every event in every state, in any
// order, lost and late words included. After each event the promises of docs/architecture.md hold. A transfer that has
// committed may be refined: once more two halves, which must never touch what their base has come to.
//
// SPECTRUMKV_WALK_SEED and SPECTRUMKV_WALK_EVENTS choose another walk; a failure prints the seed.
#include <array>
#include <cstdlib>
#include <deque>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "server/transfer/state_table.h"

namespace spectrumkv {
namespace {

constexpr uint64_t kEvents = 1'000'000;

uint64_t NumberFrom(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

Event EventOf(size_t number) { return static_cast<Event>(number); }

// What a half does with the table's answers, as Transfer does: work, the gate, blocks, words to the peer.
struct Half {
  Role role = Role::kSender;
  TransferState state = TransferState::kWaiting;
  int terminals = 0;        // how often it became terminal
  bool holds = true;        // blocks and slots
  bool working = true;      // its gate is open
  bool told = false;        // its worker knows the end
  bool committing = false;  // receiver: kStartCommit came
  std::deque<Event> inbox;  // words of the peer on their way
};

class Walk {
 public:
  explicit Walk(uint64_t seed) : random_(seed) {}

  // One transfer from its first event to the end of both halves, and its refinements. Answers how many events it took.
  uint64_t LiveOnce(uint64_t most) {
    base_.clear();
    uint64_t events = LiveHalves(most);
    if (receiver_.state != TransferState::kCommitted) return events;
    base_ = {sender_, receiver_};
    for (uint64_t i = random_() % 3; i > 0 && events < most && !testing::Test::HasFailure(); --i) {
      ++refinements;
      source_gone_ = sender_.state != TransferState::kCommitted || Chance(10);
      events += LiveHalves(most);
      source_gone_ = false;
    }
    return events;
  }

  std::set<std::array<int, 3>> seen;  // role, state, event
  uint64_t refinements = 0, refined = 0;

 private:
  bool Chance(uint32_t one_in) { return random_() % one_in == 0; }

  uint64_t LiveHalves(uint64_t most) {
    sender_ = Half{Role::kSender};
    receiver_ = Half{Role::kReceiver};
    if (source_gone_) sender_ = GoneHalf();
    uint64_t events = 0;
    while ((!IsTerminal(sender_.state) || !IsTerminal(receiver_.state)) && events < most) {
      Half& half = Chance(2) ? sender_ : receiver_;
      Half& other = &half == &sender_ ? receiver_ : sender_;
      if (&half == &sender_ && source_gone_) continue;
      Apply(&half, &other, Next(&half));
      ++events;
      Check(half);
      Check(other);
      if (!base_.empty()) DisturbBase();
      if (testing::Test::HasFailure()) return events;
    }
    // Whatever comes after the end changes nothing.
    for (Half* half : {&sender_, &receiver_}) {
      if (!IsTerminal(half->state)) continue;
      const TransferState before = half->state;
      const Event late = EventOf(random_() % kEventCount);
      Apply(half, half == &sender_ ? &receiver_ : &sender_, late);
      ++events;
      EXPECT_EQ(half->state, before) << EventName(late);
      Check(*half);
    }
    if (!base_.empty() && receiver_.state == TransferState::kCommitted) ++refined;
    if (source_gone_) {
      EXPECT_NE(receiver_.state, TransferState::kCommitted) << "refined by nobody";
    }
    return events;
  }

  // The prefill daemon is gone, or keeps nothing: no word of it comes.
  static Half GoneHalf() {
    Half half{Role::kSender, TransferState::kFailed, /*terminals=*/1};
    half.holds = half.working = false;
    half.told = true;
    return half;
  }

  // Late words, late timers: whatever still comes for a base that is being refined changes nothing of it.
  void DisturbBase() {
    if (!Chance(4)) return;
    Half& half = base_[random_() % base_.size()];
    const Half before = half;
    Half nobody;
    const Event late = EventOf(random_() % kEventCount);
    Apply(&half, &nobody, late);
    EXPECT_EQ(half.state, before.state) << "a base, by " << EventName(late);
    EXPECT_EQ(half.terminals, before.terminals);
    EXPECT_TRUE(nobody.inbox.empty()) << "a base that has ended says something";
  }

  // An event that can come to this half now: words of the peer in their order, its own progress, or a mishap.
  Event Next(Half* half) {
    if (source_gone_) return Chance(3) ? Event::kCancel : Chance(2) ? Event::kExpire : Event::kFail;
    if (!half->inbox.empty() && !Chance(8)) {
      const Event event = half->inbox.front();
      half->inbox.pop_front();
      return event;
    }
    if (Chance(40)) return Chance(2) ? Event::kCancel : Chance(2) ? Event::kExpire : Event::kFail;
    switch (half->state) {
      case TransferState::kWaiting: return Event::kPeerJoined;
      case TransferState::kPlanned: return Chance(4) ? Event::kPeerJoined : Event::kDataStarted;
      case TransferState::kStreaming: return Chance(4) ? Event::kPeerJoined : Event::kDataComplete;
      case TransferState::kVerifying:
        // Only the receiver decides by itself; a sender's commit is a receipt, which comes through the inbox.
        return half->role == Role::kReceiver && half->committing ? Event::kCommit : Event::kPeerJoined;
      default: return EventOf(random_() % kEventCount);
    }
  }

  void Apply(Half* half, Half* other, Event event) {
    seen.insert({static_cast<int>(half->role), static_cast<int>(half->state), static_cast<int>(event)});
    const TransferState before = half->state;
    const Transition t = NextState(half->role, before, event);
    if (t.action == Action::kIgnore) return;
    if (t.action == Action::kBug) return Apply(half, other, Event::kFail);  // as Transfer::Apply
    EXPECT_FALSE(IsTerminal(before)) << "something happens after the end: " << EventName(event);
    half->state = t.next;
    if (t.action == Action::kStartCommit) half->committing = true;
    if (t.action == Action::kAskPeer) other->inbox.push_back(Event::kPeerCancelled);
    if (t.action != Action::kTerminate && t.action != Action::kOutcomeUnknown) return;
    ++half->terminals;
    half->working = false;  // the gate first
    half->holds = false;
    half->told = true;
    if (!Chance(10)) TellPeer(*half, other);  // or the words are lost with the link
  }

  void TellPeer(const Half& half, Half* other) {
    switch (half.state) {
      case TransferState::kCommitted:
        if (half.role == Role::kReceiver) other->inbox.push_back(Event::kCommit);
        return;
      case TransferState::kCancelled: return other->inbox.push_back(Event::kPeerCancelled);
      case TransferState::kExpired: return other->inbox.push_back(Event::kPeerExpired);
      default: return other->inbox.push_back(Event::kPeerFailed);
    }
  }

  void Check(const Half& half) {
    const bool ended = IsTerminal(half.state);
    EXPECT_EQ(half.terminals, ended ? 1 : 0) << "exactly one terminal state";
    EXPECT_EQ(half.holds, !ended) << "something is left, or was let go of too early";
    EXPECT_EQ(half.working, !ended) << "work goes on after the end";
    EXPECT_EQ(half.told, ended);
    if (sender_.state == TransferState::kCommitted) {
      EXPECT_EQ(receiver_.state, TransferState::kCommitted) << "the receiver's commit is the truth";
    }
    if (receiver_.state == TransferState::kCommitted) {
      EXPECT_TRUE(receiver_.committing) << "committed without its commit";
    }
  }

  std::mt19937_64 random_;
  Half sender_, receiver_;
  std::vector<Half> base_;    // of the refinement that lives now: both halves, as they ended
  bool source_gone_ = false;  // its sender never comes
};

// Which pairs can come to pass is a matter of chance; that the table has an answer to each is not.
TEST(StateWalk, EveryPairHasItsPlace) {
  for (const Role role : {Role::kSender, Role::kReceiver}) {
    for (int s = static_cast<int>(TransferState::kWaiting); s <= static_cast<int>(TransferState::kExpired); ++s) {
      const auto state = static_cast<TransferState>(s);
      for (size_t e = 0; e < kEventCount; ++e) {
        const Transition t = NextState(role, state, EventOf(e));
        SCOPED_TRACE(std::string(role == Role::kSender ? "sender " : "receiver ") + StateName(state) + " " +
                     EventName(EventOf(e)));
        if (t.action == Action::kBug) {
          EXPECT_EQ(t.next, state) << "a bug goes nowhere by itself";
          EXPECT_TRUE(IsTerminal(NextState(role, state, Event::kFail).next)) << "and is ended by a failure";
        }
        if (t.action == Action::kAwaitReceipt || t.action == Action::kAskPeer || t.action == Action::kOutcomeUnknown) {
          EXPECT_EQ(role, Role::kSender);
        }
        if (t.action == Action::kStartCommit) {
          EXPECT_EQ(role, Role::kReceiver);
        }
        if (t.action == Action::kResume) {
          EXPECT_EQ(EventOf(e), Event::kPeerJoined);
          EXPECT_EQ(t.next, state) << "a new attempt goes on where the old one was";
        }
        if (t.action == Action::kIgnore) {
          EXPECT_EQ(t.next, state);
        }
      }
    }
  }
}

TEST(StateWalk, RandomWalksKeepThePromises) {
  const uint64_t events_wanted = NumberFrom("SPECTRUMKV_WALK_EVENTS", kEvents);
  uint64_t seed = NumberFrom("SPECTRUMKV_WALK_SEED", std::random_device()());
  std::set<std::array<int, 3>> seen;
  uint64_t events = 0, transfers = 0, refinements = 0, refined = 0;
  for (; events < events_wanted; ++seed, ++transfers) {
    SCOPED_TRACE("SPECTRUMKV_WALK_SEED=" + std::to_string(seed));
    Walk walk(seed);
    events += walk.LiveOnce(10'000);
    seen.insert(walk.seen.begin(), walk.seen.end());
    refinements += walk.refinements;
    refined += walk.refined;
    if (HasFailure()) {
      ADD_FAILURE() << "failed with SPECTRUMKV_WALK_SEED=" << seed << " after " << transfers << " transfers";
      return;
    }
  }
  std::printf("%llu events of %llu transfers and %llu refinements (%llu committed), %zu of %zu (role, state, event)\n",
              static_cast<unsigned long long>(events), static_cast<unsigned long long>(transfers),
              static_cast<unsigned long long>(refinements), static_cast<unsigned long long>(refined), seen.size(),
              2 * 8 * kEventCount);
  // Those that cannot come: progress before joining, and receipts or data in states that have neither.
  if (events_wanted >= kEvents) {
    EXPECT_GE(seen.size(), 120u) << "the walk has become too tame to prove anything";
    EXPECT_GT(refined, refinements / 10) << "the walk has become too tame to prove anything";
    EXPECT_LT(refined, refinements * 9 / 10);
  }
}

}  // namespace
}  // namespace spectrumkv
