// Fault injection: each fault is armed from Python and fires inside the device, where a real one would.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

namespace npusim::faults {

enum class CollectiveFault { none, fail, hang };

void fail_allocation(int device, int64_t nth);  // the nth allocation from now on raises out of memory, once; device -1: any
void lose_device(int device);                   // every operation on it raises from now on
void break_collective(const std::string& operation, int64_t nth, CollectiveFault fault);  // the nth call from now on, once
void clear();

bool allocation_fails(int device);  // counts one allocation
CollectiveFault on_collective(const std::string& operation);  // counts one call

extern std::atomic<uint64_t> lost_devices;  // one bit per logical device
[[noreturn]] void raise_lost(int device);
inline void check_device(int device) {  // on the path of every operation: one relaxed load while nothing is lost
  const auto lost = lost_devices.load(std::memory_order_relaxed);
  if (__builtin_expect(lost != 0, 0) && device >= 0 && (lost >> device & 1)) raise_lost(device);
}

}  // namespace npusim::faults
