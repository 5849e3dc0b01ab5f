#include "memory.h"
#include "faults.h"
#include "ledger.h"
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace npusim {
namespace {

constexpr uint64_t kBlock = 512;         // a tensor takes whole blocks
constexpr uint64_t kSegment = 2u << 20;  // a process takes whole segments from the device
uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// The caching allocator, reduced to its arithmetic: a freed block returns to the host at once but stays *reserved*, and later tensors use
// the reserved bytes first. There is no fragmentation: reserved is the high-water mark since the last empty_cache().
struct DeviceMemory {
  std::mutex mutex;
  MemoryStats stats;
  uint64_t total = 0;
  double fraction = 1.0;
};

DeviceMemory devices[kMaxDevices];
Ledger& ledger() {
  static Ledger* instance = new Ledger();  // never destroyed: tensors may outlive every static
  return *instance;
}
void leave_ledger() { ledger().leave(); }

std::string mebibytes(uint64_t bytes) { return c10::str(static_cast<double>(bytes * 100 / (1u << 20)) / 100.0, " MiB"); }

[[noreturn]] void raise_out_of_memory(int device, uint64_t bytes, bool injected) {
  const auto& memory = devices[device];
  const auto by_all = ledger().reserved_by_all(settings().physical_ids[device]);
  const auto free = memory.total > by_all ? memory.total - by_all : 0;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", mebibytes(bytes), " (npu:", device, "; ",
                   mebibytes(memory.total), " total capacity; ", mebibytes(memory.stats.allocated), " already allocated; ",
                   mebibytes(memory.stats.reserved), " reserved by this process; ",
                   mebibytes(by_all - std::min(by_all, memory.stats.reserved)),
                   " held by other processes; ", mebibytes(free), " free). This is a simulated NPU",
                   injected ? " and the failure an injected fault." : ": COOKBOOK_NPU_SIM_MEMORY sets its capacity in bytes.");
}

void grow_reservation(int device, uint64_t bytes, uint64_t wanted) {
  auto& memory = devices[device];
  const auto limit = static_cast<uint64_t>(static_cast<double>(memory.total) * memory.fraction);
  const auto physical = settings().physical_ids[device];
  // Whole segments while they fit; the last partial segment of the device is still usable.
  for (const auto step : {round_up(bytes, kSegment), bytes}) {
    if (memory.stats.reserved + step > limit || !ledger().reserve(physical, step, memory.total)) continue;
    memory.stats.reserved += step;
    memory.stats.peak_reserved = std::max(memory.stats.peak_reserved, memory.stats.reserved);
    return;
  }
  memory.stats.out_of_memory++;
  raise_out_of_memory(device, wanted, false);
}

uint64_t charge(int device, uint64_t bytes) {
  const auto charged = round_up(bytes, kBlock);
  auto& memory = devices[device];
  use_devices();
  faults::check_device(device);
  std::lock_guard<std::mutex> guard(memory.mutex);
  auto& stats = memory.stats;
  if (faults::allocation_fails(device)) {
    stats.out_of_memory++;
    raise_out_of_memory(device, bytes, true);
  }
  if (stats.allocated + charged > stats.reserved) grow_reservation(device, stats.allocated + charged - stats.reserved, bytes);
  stats.allocated += charged;
  stats.peak_allocated = std::max(stats.peak_allocated, stats.allocated);
  stats.allocations++;
  stats.live_blocks++;
  return charged;
}

void refund(int device, uint64_t charged) {
  auto& memory = devices[device];
  std::lock_guard<std::mutex> guard(memory.mutex);
  memory.stats.allocated -= charged;
  memory.stats.frees++;
  memory.stats.live_blocks--;
}

// In front of each block of our own: what to refund, and where.
struct Header {
  uint64_t charged;
  int device;
};
constexpr size_t kHeaderSpace = 64;  // keeps the data as aligned as the host allocator made it

void free_block(void* data) {
  if (!data) return;
  auto* start = static_cast<char*>(data) - kHeaderSpace;
  Header header;
  std::memcpy(&header, start, sizeof header);
  refund(header.device, header.charged);
  c10::free_cpu(start);
}

// A device has no page faults. The host's take longer than the copy of what they bring, so large blocks ask for huge pages; where the kernel
// has none to give, nothing is different but the time.
void* with_huge_pages(void* start, uint64_t bytes) {
  constexpr uint64_t kHuge = 2u << 20;
  const auto address = reinterpret_cast<uintptr_t>(start), first = round_up(address, kHuge), last = (address + bytes) / kHuge * kHuge;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  return start;
}

using c10::CachingDeviceAllocator::DeviceStats;

class NpuAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    if (bytes == 0) return {nullptr, nullptr, &free_block, npu(device)};
    const Header header{charge(device, bytes), device};
    auto* start = static_cast<char*>(with_huge_pages(c10::alloc_cpu(header.charged + kHeaderSpace), header.charged));
    std::memcpy(start, &header, sizeof header);
    return {start + kHeaderSpace, start + kHeaderSpace, &free_block, npu(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(); }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  void resetAccumulatedStats(c10::DeviceIndex device) override { reset_accumulated(device); }
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override { return {memory_free(device), memory_total(device)}; }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const auto stats = memory_stats(device);
    DeviceStats result;
    for (auto* bytes : {&result.allocated_bytes, &result.active_bytes, &result.requested_bytes}) {
      (*bytes)[0].current = static_cast<int64_t>(stats.allocated);
      (*bytes)[0].peak = static_cast<int64_t>(stats.peak_allocated);
    }
    result.reserved_bytes[0].current = static_cast<int64_t>(stats.reserved);
    result.reserved_bytes[0].peak = static_cast<int64_t>(stats.peak_reserved);
    result.allocation[0].current = static_cast<int64_t>(stats.live_blocks);
    result.allocation[0].allocated = static_cast<int64_t>(stats.allocations);
    result.allocation[0].freed = static_cast<int64_t>(stats.frees);
    result.num_ooms = static_cast<int64_t>(stats.out_of_memory);
    return result;
  }
};
NpuAllocator npu_allocator;
REGISTER_ALLOCATOR(kNpu, &npu_allocator);

// The context of adopted memory: the host block itself and what to refund when it goes.
struct Adopted {
  c10::DataPtr host;
  uint64_t charged;
  int device;
};
void free_adopted(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  refund(adopted->device, adopted->charged);
  delete adopted;
}

// Memory that several processes map through a file: an exported block in the process that owns it, and the same block where it was opened.
// Only the owner is charged, as on a device.
struct SharedBlock {
  void* start;
  size_t bytes;
  int descriptor;  // -1: opened here, owned by another process
  int device;
  uint64_t charged = 0;
};
void free_shared(void* context) {
  auto* block = static_cast<SharedBlock*>(context);
  munmap(block->start, block->bytes);
  if (block->descriptor >= 0) {
    ::close(block->descriptor);
    refund(block->device, block->charged);
  }
  delete block;
}
c10::DataPtr map_shared(SharedBlock block, int descriptor) {
  block.start = mmap(nullptr, block.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  TORCH_CHECK(block.start != MAP_FAILED, "simulated NPU: cannot map ", block.bytes, " bytes of another process: ", std::strerror(errno));
  return {block.start, new SharedBlock(block), &free_shared, npu(block.device)};
}

// Pinned host memory is ordinary memory whose address is remembered. A freed block returns to the system at once but counts as cached, as
// freed device memory does: a program that never empties the cache of a real host allocator keeps that memory pinned.
std::mutex pinned_mutex;
HostStats pinned_stats;
std::unordered_map<const void*, size_t>& pinned_blocks() {
  static auto* blocks = new std::unordered_map<const void*, size_t>();
  return *blocks;
}
void free_pinned(void* data) {
  {
    std::lock_guard<std::mutex> guard(pinned_mutex);
    auto block = pinned_blocks().find(data);
    pinned_stats.active -= block->second;
    pinned_blocks().erase(block);
  }
  c10::free_cpu(data);
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = with_huge_pages(c10::alloc_cpu(std::max<size_t>(bytes, 1)), bytes);
    std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned_blocks()[data] = bytes;
    auto& stats = pinned_stats;
    stats.active += bytes;
    stats.peak_active = std::max(stats.peak_active, stats.active);
    stats.allocated = std::max(stats.allocated, stats.active);
    stats.peak_allocated = std::max(stats.peak_allocated, stats.allocated);
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override { host_empty_cache(); }
  at::HostStats get_stats() override {
    const auto stats = host_stats();
    at::HostStats result;
    result.active_bytes.current = static_cast<int64_t>(stats.active);
    result.active_bytes.peak = static_cast<int64_t>(stats.peak_active);
    result.allocated_bytes.current = static_cast<int64_t>(stats.allocated);
    result.allocated_bytes.peak = static_cast<int64_t>(stats.peak_allocated);
    return result;
  }
  void reset_accumulated_stats() override {}  // allocations are not counted
  void reset_peak_stats() override { host_reset_peak(); }
};
PinnedAllocator the_pinned_allocator;
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &the_pinned_allocator);

}  // namespace

void open_memory() {
  for (auto& memory : devices) memory.total = settings().memory_bytes;
  ledger().close();  // of an earlier configuration
  if (settings().session_file.empty()) return;
  ledger().open(settings().session_file);
  [[maybe_unused]] static const int once = std::atexit(&leave_ledger);
}

MemoryStats memory_stats(int device) {
  std::lock_guard<std::mutex> guard(devices[device].mutex);
  return devices[device].stats;
}
uint64_t memory_total(int device) { return devices[device].total; }
uint64_t memory_free(int device) {
  const auto used = ledger().reserved_by_all(settings().physical_ids[device]);
  return used < devices[device].total ? devices[device].total - used : 0;
}
void set_memory_total(int device, uint64_t bytes) { devices[device].total = bytes; }
void set_memory_fraction(int device, double fraction) { devices[device].fraction = fraction; }

void reset_peak(int device) {
  std::lock_guard<std::mutex> guard(devices[device].mutex);
  auto& stats = devices[device].stats;
  stats.peak_allocated = stats.allocated;
  stats.peak_reserved = stats.reserved;
}
void reset_accumulated(int device) {
  std::lock_guard<std::mutex> guard(devices[device].mutex);
  auto& stats = devices[device].stats;
  stats.allocations = stats.frees = stats.out_of_memory = 0;
}

void reset_memory() {
  for (int device = 0; device < device_count(); ++device) {
    std::lock_guard<std::mutex> guard(devices[device].mutex);
    TORCH_CHECK(devices[device].stats.live_blocks == 0, "simulated NPU: npu:", device, " cannot be reset, ",
                devices[device].stats.live_blocks, " tensors lie in its memory");
  }
  empty_cache();
  for (int device = 0; device < device_count(); ++device) {
    std::lock_guard<std::mutex> guard(devices[device].mutex);
    devices[device].stats = {};
    devices[device].fraction = 1.0;
  }
}

void empty_cache() {
  for (int device = 0; device < device_count(); ++device) {
    auto& memory = devices[device];
    std::lock_guard<std::mutex> guard(memory.mutex);
    const auto needed = std::min(memory.stats.reserved, round_up(memory.stats.allocated, kSegment));
    if (needed == memory.stats.reserved) continue;
    ledger().give_back(settings().physical_ids[device], memory.stats.reserved - needed);
    memory.stats.reserved = needed;
  }
}

void take_outside(int device, uint64_t bytes) {
  if (bytes == 0) return;
  if (!ledger().reserve(settings().physical_ids[device], bytes, devices[device].total)) raise_out_of_memory(device, bytes, false);
}
void give_back_outside(int device, uint64_t bytes) {
  if (bytes > 0) ledger().give_back(settings().physical_ids[device], bytes);
}

HostStats host_stats() {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  return pinned_stats;
}
void host_empty_cache() {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  pinned_stats.allocated = pinned_stats.active;
}
void host_reset_peak() {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  pinned_stats.peak_active = pinned_stats.active;
  pinned_stats.peak_allocated = pinned_stats.allocated;
}

c10::Allocator* device_allocator() { return &npu_allocator; }
c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }
bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  return pinned_blocks().count(pointer) > 0;
}
uint64_t pinned_bytes() {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  uint64_t sum = 0;
  for (const auto& [pointer, bytes] : pinned_blocks()) sum += bytes;
  return sum;
}

c10::DataPtr adopt_data(c10::DataPtr data, size_t bytes, c10::Device device) {
  if (bytes == 0) return {nullptr, nullptr, &free_block, npu(device.index())};
  const auto target = npu(device.index());
  const auto charged = charge(target.index(), bytes);
  void* pointer = data.get();
  return {pointer, new Adopted{std::move(data), charged, target.index()}, &free_adopted, target};
}

int export_storage(const c10::Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  const auto& data = impl->data_ptr();
  if (data.get_deleter() == &free_shared) {
    const auto descriptor = static_cast<SharedBlock*>(data.get_context())->descriptor;
    TORCH_CHECK(descriptor >= 0, "simulated NPU: only the process that owns a block of memory exports it");
    return descriptor;
  }
  const auto bytes = impl->nbytes();
  TORCH_CHECK(bytes > 0, "simulated NPU: an empty tensor has no memory to export");
  const int descriptor = memfd_create("simulated_npu", MFD_CLOEXEC), device = impl->device().index();
  TORCH_CHECK(descriptor >= 0 && ftruncate(descriptor, static_cast<off_t>(bytes)) == 0, "simulated NPU: cannot export ", bytes,
              " bytes: ", std::strerror(errno));
  const auto charged = round_up(bytes, kBlock);
  auto shared = map_shared({nullptr, bytes, descriptor, device, charged}, descriptor);
  std::memcpy(shared.get(), impl->data(), bytes);
  impl->set_data_ptr_noswap(std::move(shared));  // refunds the old block, which is the same device memory
  std::lock_guard<std::mutex> guard(devices[device].mutex);
  devices[device].stats.allocated += charged;
  devices[device].stats.live_blocks++;
  return descriptor;
}
c10::DataPtr open_exported(int descriptor, size_t bytes, int device) {
  use_devices();
  faults::check_device(device);
  return map_shared({nullptr, bytes, -1, device}, descriptor);
}

c10::Storage adopt_storage(const c10::Storage& storage, c10::Device device) {
  auto* impl = storage.unsafeGetStorageImpl();
  if (impl->device_type() == kNpu) return storage;  // an earlier result of the same operator lies in it
  if (impl->nbytes() > 0) impl->mutable_data();  // a lazily copied storage gets its own bytes now
  auto host = impl->set_data_ptr(c10::DataPtr());
  impl->set_data_ptr_noswap(adopt_data(std::move(host), impl->nbytes(), device));
  impl->set_allocator(&npu_allocator);
  return storage;
}

}  // namespace npusim
