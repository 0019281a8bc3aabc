#include "server/stream/memory_transport.h"

#include <algorithm>
#include <utility>

#include "server/stream/memory_link.h"

namespace spectrumkv {

class MemoryDialler final : public Transport {
 public:
  MemoryDialler(MemoryNetwork* network, std::string name) : network_(network), name_(std::move(name)) {}

  std::shared_ptr<ControlStream> OpenControl(const std::string& peer_address,
                                             std::shared_ptr<ControlListener> listener) override {
    auto link = std::make_shared<MemoryLink>(network_, name_, peer_address, false, DataOpenFrame{});
    link->SetListener(std::move(listener));
    network_->Track(link);
    link->Connect();
    return NewMemoryControl(link, 0);
  }

  std::shared_ptr<DataStream> OpenData(const std::string& peer_address, const DataOpenFrame& open,
                                       std::shared_ptr<DataListener> listener) override {
    auto link = std::make_shared<MemoryLink>(network_, name_, peer_address, true, open);
    link->SetListener(std::move(listener));
    network_->Track(link);
    link->Connect();
    return NewMemoryData(link, 0);
  }

  void GiveUp(const std::string& peer_address) override { network_->NoteGivenUp(name_, peer_address); }

 private:
  MemoryNetwork* const network_;
  const std::string name_;
};

MemoryNetwork::MemoryNetwork(Executor* executor, Clock* clock) : clock_(clock), executor_(executor) {
  if (executor_ != nullptr) return;
  own_executor_ = std::make_unique<ThreadPool>(1);
  executor_ = own_executor_.get();
}

MemoryNetwork::~MemoryNetwork() {
  std::vector<std::weak_ptr<MemoryLink>> links;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_.clear();
    links.swap(links_);
  }
  for (const auto& weak : links) {
    if (auto link = weak.lock()) link->Break();
  }
  own_executor_ = nullptr;  // runs what is left
}

void MemoryNetwork::AddEnd(const std::string& name, PeerAcceptor* acceptor) {
  std::lock_guard<std::mutex> lock(mutex_);
  ends_[name] = acceptor;
}

void MemoryNetwork::RemoveEnd(const std::string& name) {
  std::vector<std::shared_ptr<MemoryLink>> broken;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_.erase(name);
    for (const auto& weak : links_) {
      auto link = weak.lock();
      if (link != nullptr && (link->name(0) == name || link->name(1) == name)) broken.push_back(std::move(link));
    }
  }
  for (const auto& link : broken) link->Break();
}

std::unique_ptr<Transport> MemoryNetwork::TransportOf(const std::string& name) {
  return std::make_unique<MemoryDialler>(this, name);
}

void MemoryNetwork::SetFaultHook(FaultHook hook) {
  std::lock_guard<std::mutex> lock(mutex_);
  hook_ = std::move(hook);
}

void MemoryNetwork::NoteGivenUp(const std::string& from, const std::string& to) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++given_up_[{from, to}];
}

int MemoryNetwork::given_up(const std::string& from, const std::string& to) {
  std::lock_guard<std::mutex> lock(mutex_);
  return given_up_[{from, to}];
}

void MemoryNetwork::Track(const std::shared_ptr<MemoryLink>& link) {
  std::lock_guard<std::mutex> lock(mutex_);
  links_.erase(std::remove_if(links_.begin(), links_.end(), [](const auto& weak) { return weak.expired(); }),
               links_.end());
  links_.push_back(link);
}

PeerAcceptor* MemoryNetwork::FindEnd(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = ends_.find(name);
  return found == ends_.end() ? nullptr : found->second;
}

Fault MemoryNetwork::AskHook(const FaultPoint& point) {
  FaultHook hook;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    hook = hook_;
  }
  return hook ? hook(point) : Fault{};
}

}  // namespace spectrumkv
