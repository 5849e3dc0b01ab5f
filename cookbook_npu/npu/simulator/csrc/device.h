// Process-wide state of the simulated NPU: which devices exist, which one is current, and who answers for faults.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace npusim {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 64;

// What the Python side decides before the devices are used: once, or again in a fork of a process that had not used them.
struct Settings {
  std::vector<int> physical_ids;  // logical index -> id on the machine; ASCEND_RT_VISIBLE_DEVICES re-numbers devices this way
  size_t memory_bytes = 0;        // capacity of each device
  std::string session_file;       // shared accounting table; empty: this process only
};
void configure(Settings settings);  // raises once the devices are used
const Settings& settings();

// Every use of a device (memory, a generator, making it current) says so. After a fork the child may use the devices only if the parent had
// not: what PyTorch asks of CUDA.
void use_devices();
bool devices_used() noexcept;
void reset_devices();  // as if nobody had used them; raises while something of this process lies in their memory

int device_count() noexcept;
int current_device() noexcept;
void set_current_device(int index);                     // raises for an index that does not exist
void set_current_device_unchecked(int index) noexcept;  // for destructors

// The device a caller means: an index below 0 stands for the current one.
inline int resolve_index(int index) { return index < 0 ? current_device() : index; }
inline c10::Device npu(int index) { return c10::Device(kNpu, static_cast<c10::DeviceIndex>(resolve_index(index))); }

int64_t fallback_count();            // operators that ran through the fallback so far
void take_composite_operators();     // once, after PyTorch has registered all its operators

}  // namespace npusim
