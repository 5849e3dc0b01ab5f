#include "faults.h"
#include <c10/util/Exception.h>
#include <mutex>
#include <unordered_map>

namespace npusim::faults {

std::atomic<uint64_t> lost_devices{0};

namespace {
struct AllocationFault { int device; int64_t remaining; };
struct CallFault { int64_t remaining; CollectiveFault fault; };

std::mutex mutex;
std::atomic<bool> allocation_armed{false}, collective_armed{false};  // keep the unarmed paths free of the lock
AllocationFault allocation{-1, 0};
std::unordered_map<std::string, CallFault> collectives;
}  // namespace

void fail_allocation(int device, int64_t nth) {
  std::lock_guard<std::mutex> guard(mutex);
  allocation = {device, nth};
  allocation_armed = nth > 0;
}

bool allocation_fails(int device) {
  if (!allocation_armed.load(std::memory_order_relaxed)) return false;
  std::lock_guard<std::mutex> guard(mutex);
  if (allocation.device >= 0 && allocation.device != device) return false;
  if (--allocation.remaining > 0) return false;
  allocation_armed = false;
  return true;
}

void break_collective(const std::string& operation, int64_t nth, CollectiveFault fault) {
  std::lock_guard<std::mutex> guard(mutex);
  collectives[operation] = {nth, fault};
  collective_armed = true;
}

CollectiveFault on_collective(const std::string& operation) {
  if (!collective_armed.load(std::memory_order_relaxed)) return CollectiveFault::none;
  std::lock_guard<std::mutex> guard(mutex);
  auto found = collectives.find(operation);
  if (found == collectives.end() || --found->second.remaining > 0) return CollectiveFault::none;
  const auto fault = found->second.fault;
  collectives.erase(found);
  collective_armed = !collectives.empty();
  return fault;
}

void lose_device(int device) { lost_devices |= uint64_t{1} << device; }

void raise_lost(int device) {
  TORCH_CHECK(false, "NPU error: device npu:", device, " is lost (simulated NPU, injected fault). "
              "End this process; a new one, or simulator.faults.clear(), gets the device back.");
}

void clear() {
  std::lock_guard<std::mutex> guard(mutex);
  allocation_armed = collective_armed = false;
  collectives.clear();
  lost_devices = 0;
}

}  // namespace npusim::faults
