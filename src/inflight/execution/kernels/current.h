// What a backend's calls share during a step.
#pragma once

#include <memory>
#include <mutex>
#include <utility>

namespace inflight {

// A running call keeps its step if another thread begins one.
template <class Step>
class Current {
 public:
  std::shared_ptr<const Step> get() const {
    const std::lock_guard lock(mutex_);
    return step_;
  }
  void set(std::shared_ptr<const Step> step) {
    const std::lock_guard lock(mutex_);
    step_ = std::move(step);
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const Step> step_ = std::make_shared<Step>();
};

}  // namespace inflight
