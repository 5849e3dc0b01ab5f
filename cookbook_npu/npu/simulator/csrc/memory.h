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
void reset_memory();  // every counter as in a new process; raises while something lies in it
// Memory of a device that is nobody's tensor (buffers of communicators): only the device's free memory shows it.
void take_outside(int device, uint64_t bytes);
void give_back_outside(int device, uint64_t bytes);

struct HostStats {
  uint64_t active = 0, peak_active = 0;        // bytes of pinned tensors
  uint64_t allocated = 0, peak_allocated = 0;  // bytes pinned: tensors and the cache of freed blocks
};
HostStats host_stats();
void host_empty_cache();
void host_reset_peak();
uint64_t pinned_bytes();

c10::Allocator* device_allocator();
bool is_pinned(const void* pointer);
c10::Allocator* pinned_allocator();

// Memory that other processes of the machine may map: a file that holds the storage from now on, and a storage over such a file.
int export_storage(const c10::Storage& storage);
c10::DataPtr open_exported(int descriptor, size_t bytes, int device);

// The device storage for what a CPU kernel filled: here the same one, whose bytes are charged to the device until it dies.
c10::Storage adopt_storage(const c10::Storage& storage, c10::Device device);
// The same for a bare pointer that leaves its host storage.
c10::DataPtr adopt_data(c10::DataPtr data, size_t bytes, c10::Device device);

}  // namespace npusim
