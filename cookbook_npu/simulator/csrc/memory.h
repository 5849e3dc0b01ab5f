// Device memory: host memory that is counted as if it were the memory of a device with a fixed capacity.
#pragma once
#include "device.h"
#include <c10/core/Storage.h>
#include <cstdint>
#include <string>

namespace npusim {

struct MemoryStats {
  uint64_t allocated = 0, peak_allocated = 0;  // bytes that tensors hold
  uint64_t reserved = 0, peak_reserved = 0;    // bytes this process took from the device: allocated plus cached
  uint64_t live_blocks = 0, allocations = 0, frees = 0, out_of_memory = 0;
};
MemoryStats memory_stats(int device);
uint64_t memory_total(int device);
uint64_t memory_free(int device);  // what no process has reserved
void reset_peak(int device);
void reset_accumulated(int device);
void set_memory_total(int device, uint64_t bytes);
void set_memory_fraction(int device, double fraction);
void empty_cache();
uint64_t pinned_bytes();

c10::Allocator* device_allocator();
bool is_pinned(const void* pointer);
c10::Allocator* pinned_allocator();

// Turn a storage that a CPU kernel filled into a device storage, in place: its bytes are charged to the device until it dies.
void adopt_storage(c10::StorageImpl* storage, c10::Device device);
// The same for a bare pointer that leaves its host storage.
c10::DataPtr adopt_data(c10::DataPtr data, size_t bytes, c10::Device device);

}  // namespace npusim
