// What PyTorch asks of a backend besides kernels: current device, streams, events, random generators, hooks.
#include "device.h"
#include "faults.h"
#include "generator.h"
#include "memory.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <mutex>
#include <pthread.h>

namespace npusim {

void open_memory();

namespace {
Settings the_settings;
thread_local int the_current_device = 0;
thread_local int64_t current_streams[kMaxDevices] = {};
std::atomic<bool> used{false};    // by this process, or by the one it was forked from
std::atomic<bool> forked{false};  // from a process that had used the devices

void check_index(int index) {
  TORCH_CHECK(index < device_count(), "NPU error: invalid device ordinal ", index, " (", device_count(), " simulated NPUs are visible; "
              "COOKBOOK_NPU_SIM_DEVICES sets how many exist, ASCEND_RT_VISIBLE_DEVICES narrows them)");
  use_devices();
  faults::check_device(index);
}
}  // namespace

void use_devices() {
  TORCH_CHECK(!forked.load(std::memory_order_relaxed),
              "Cannot re-initialize the NPU in a forked process: the devices were used before the fork. Use the 'spawn' start method "
              "(simulated NPU; a real one has the same limit)");
  if (!used.load(std::memory_order_relaxed)) used = true;
}
bool devices_used() noexcept { return used; }

void reset_devices() {
  use_devices();
  reset_memory();
  reset_generators();
  the_current_device = 0;
  std::fill(std::begin(current_streams), std::end(current_streams), 0);
  used = false;
}

void configure(Settings settings) {
  TORCH_CHECK(!used, "simulated NPU: the devices are in use, they cannot be configured any more");
  the_settings = std::move(settings);
  open_memory();
  [[maybe_unused]] static const int once = pthread_atfork(nullptr, nullptr, [] { forked = used.load(); });
}
const Settings& settings() { return the_settings; }
int device_count() noexcept { return static_cast<int>(the_settings.physical_ids.size()); }
int current_device() noexcept { return the_current_device; }
void set_current_device_unchecked(int index) noexcept { if (index >= 0) the_current_device = index; }
void set_current_device(int index) {
  if (index < 0) return;
  check_index(index);
  the_current_device = index;
}

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

// An event is a reading of the host's clock. Work is done when its call returns, so every event has happened and every stream is idle.
struct Event {
  std::chrono::steady_clock::time_point time;
};

class NpuGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kNpu; }
  Device getDevice() const override { return npu(current_device()); }
  void setDevice(Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { set_current_device_unchecked(device.index()); }
  Device exchangeDevice(Device device) const override {
    const auto previous = getDevice();
    if (device.index() != previous.index()) set_current_device(device.index());
    return previous;
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count()); }

  Stream getStream(Device device) const override { return stream(device, current_streams[resolve_index(device.index())]); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getNewStream(Device device, int /*priority*/) const override {
    static std::atomic<int64_t> next{1};
    return stream(device, next++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream next) const override {
    const auto previous = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return previous;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& which) const override { faults::check_device(which.device_index()); }
  void synchronizeDevice(DeviceIndex device) const override { check_index(resolve_index(device)); }
  bool isStreamCapturing(const Stream&) const { return false; }  // no `override`: PyTorch 2.10 does not ask
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event();
    static_cast<Event*>(*event)->time = std::chrono::steady_clock::now();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* start, void* end, DeviceIndex) const override {
    TORCH_CHECK(start && end, "Both events must be recorded before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(end)->time - static_cast<Event*>(start)->time).count();
  }

 private:
  static Stream stream(Device device, int64_t id) { return Stream(Stream::UNSAFE, npu(device.index()), id); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, NpuGuard);

// Random numbers come from a hidden CPU generator, one per device: the same seed gives the same numbers as on the CPU.
class NpuGenerator final : public c10::GeneratorImpl {
 public:
  at::Generator host;
  explicit NpuGenerator(DeviceIndex index)
      : GeneratorImpl(npu(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::detail::createCPUGenerator(c10::default_rng_seed_val)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "the generator of a simulated NPU has no Philox offset: use get_state() and set_state()");
  }
  uint64_t get_offset() const override { return 0; }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.get_state().getIntrusivePtr(); }
  void set_state(const c10::TensorImpl& state) override {
    host.set_state(at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(const_cast<c10::TensorImpl*>(&state))));
  }
  NpuGenerator* clone_impl() const override {
    auto* copy = new NpuGenerator(device().index());
    copy->host = host.clone();
    return copy;
  }
};

class NpuHooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(current_device()); }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto previous = getCurrentDevice();
    set_current_device(device);
    return previous;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  Device getDeviceFromPtr(void*) const override { return npu(current_device()); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override { return at::make_generator<NpuGenerator>(resolve_index(index)); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto* impl = storage.unsafeGetStorageImpl();
    auto data = device_allocator()->allocate(bytes);
    if (bytes && impl->nbytes()) std::memcpy(data.get(), impl->data(), std::min(bytes, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};
}  // namespace

namespace {
std::mutex generators_mutex;
std::vector<at::Generator>& generators() {
  static auto* made = new std::vector<at::Generator>();  // never destroyed, as the ledger
  return *made;
}
}  // namespace

void reset_generators() {
  std::lock_guard<std::mutex> guard(generators_mutex);
  generators().clear();
}

const at::Generator& default_generator(int device) {
  const int index = resolve_index(device);
  check_index(index);
  std::lock_guard<std::mutex> guard(generators_mutex);
  auto& all = generators();
  if (all.empty()) {
    for (int made = 0; made < device_count(); ++made) all.push_back(at::make_generator<NpuGenerator>(made));
  }
  return all[index];
}

at::Generator host_generator(const std::optional<at::Generator>& generator, c10::Device device) {
  const auto& chosen = generator && generator->defined() ? *generator : default_generator(device.index());
  return chosen.get<NpuGenerator>()->host;
}

void register_hooks() {
  static NpuHooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

}  // namespace npusim
