// top: a live view of one daemon.
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <thread>
#include <utility>

#include "client/ctl/command.h"
#include "client/ctl/top_view.h"

namespace spectrumkv::ctl {
namespace {

using Steady = std::chrono::steady_clock;

constexpr uint32_t kTransfersShown = 100;
// Of a terminal that does not say how large it is, and of what is no terminal.
constexpr size_t kRows = 40, kColumns = 160, kPipeRows = 1000;
constexpr double kShortestSeconds = 0.2, kLongestSeconds = 3600;

absl::StatusOr<Look> LookAt(const Connection& connection) {
  Look look;
  const auto status = CallAdmin(connection, &AdminStub::GetStatus, v1::GetStatusRequest());
  if (!status.ok()) return status.status();
  const auto peers = CallAdmin(connection, &AdminStub::ListPeers, v1::ListPeersRequest());
  if (!peers.ok()) return peers.status();
  v1::ListTransfersRequest active;
  active.set_active_only(true);
  active.set_limit(kTransfersShown);
  const auto transfers = CallAdmin(connection, &AdminStub::ListTransfers, active);
  if (!transfers.ok()) return transfers.status();
  const auto metrics = CallAdmin(connection, &AdminStub::GetMetrics, v1::GetMetricsRequest());
  if (!metrics.ok()) return metrics.status();
  // Of the counters: those are what rates come from.
  look.at_seconds = std::chrono::duration<double>(Steady::now().time_since_epoch()).count();
  look.status = *status;
  look.peers = *peers;
  look.transfers = *transfers;
  look.metrics = Exposition::Parse(metrics->text());
  return look;
}

std::string TimeOfDay() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char text[16];
  std::strftime(text, sizeof(text), "%H:%M:%S", &local);
  return text;
}

class Screen {
 public:
  Screen() : terminal_(isatty(STDOUT_FILENO) == 1) {}
  bool terminal() const { return terminal_; }

  // Over what was there, on a terminal.
  void Show(const Look& look, const TopNumbers& numbers, bool json) {
    if (json) {
      std::fputs(TopJson(look, numbers, TimeOfDay()).c_str(), stdout);
    } else {
      const auto [rows, columns] = Size();
      const std::string frame = TopFrame(look, numbers, TimeOfDay(), rows, columns);
      if (terminal_) std::fputs("\x1b[H\x1b[J", stdout);
      if (!terminal_ && !first_) std::fputc('\n', stdout);
      std::fputs(frame.c_str(), stdout);
    }
    first_ = false;
    std::fflush(stdout);
  }

 private:
  std::pair<size_t, size_t> Size() const {
    winsize size{};
    if (!terminal_) return {kPipeRows, kColumns};
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0 || size.ws_col == 0) return {kRows, kColumns};
    // The cursor stands on the last line.
    return {std::max<size_t>(size.ws_row, 2) - 1, size.ws_col};
  }

  const bool terminal_;
  bool first_ = true;
};

absl::StatusOr<int> Top(const Context& context, Args args) {
  Screen screen;
  const double seconds = args.Real("interval", 1);
  const bool once = args.Switch("once");
  if (once && args.Has("iterations")) args.Refuse("--once and --iterations exclude each other");
  // A pipe gets one frame, a terminal as many as its user watches.
  const uint64_t ends = screen.terminal() ? 0 : 1;
  const uint64_t frames = once ? 1 : args.Number("iterations", ends, 1, 1'000'000'000);
  if (seconds < kShortestSeconds || seconds > kLongestSeconds) args.Refuse("--interval must be from 0.2 to 3600 seconds");
  if (const absl::Status status = args.Check(); !status.ok()) return status;

  absl::StatusOr<Look> before = LookAt(context.connection);
  if (!before.ok()) return before.status();
  for (uint64_t frame = 0; frames == 0 || frame < frames; ++frame) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    absl::StatusOr<Look> now = LookAt(context.connection);
    if (!now.ok() && (!screen.terminal() || frames != 0)) return now.status();
    if (!now.ok()) {  // it may come back, and somebody watches
      std::printf("\x1b[H\x1b[J%s  %s\n", TimeOfDay().c_str(), std::string(now.status().message()).c_str());
      std::fflush(stdout);
      continue;
    }
    screen.Show(*now, NumbersBetween(*before, *now), context.json);
    before = std::move(now);
  }
  return kOk;
}

}  // namespace

std::vector<Command> TopCommands() {
  return {{"top",
           "",
           "live view: bytes and ratio, tiers, ends and errors a second, peers, transfers under way",
           {{"interval", "SECONDS", "between frames, at least 0.2; default 1"},
            {"iterations", "N", "frames, then end; default without end on a terminal, 1 elsewhere"},
            {"once", "", "one frame"}},
           Top}};
}

}  // namespace spectrumkv::ctl
