// The bridge: torch_npu keeps its devices, allocator, streams, tensors and Python side, but its kernels, which need CANN's operators, are
// replaced by those of the CPU. The simulated NPU's own fallback does it (cookbook_npu/npu/simulator/csrc); this file supplies the three things
// that it asks of a device: memory for results, the generator behind a random operator, and the current device.
#include "compute.h"
#include "device.h"
#include "fallback.h"
#include "generator.h"
#include "hccl.h"
#include "launches.h"
#include "memory.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>
#include <dlfcn.h>
#include <torch/library.h>
#include <cstring>
#include <unordered_set>

namespace npusim {

int current_device() noexcept { return c10::impl::VirtualGuardImpl(kNpu).getDevice().index(); }

// ---- memory: results move into memory of torch_npu's allocator, which keeps the accounts and raises when the device is full

c10::Storage adopt_storage(const c10::Storage& storage, c10::Device device) {
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  const auto tensor = at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
  if (bytes) std::memcpy(tensor.mutable_data_ptr(), storage.data(), storage.nbytes());
  return tensor.storage();
}

// The real HCCL takes its buffers from CANN behind torch_npu's back; over gloo there are none, and torch_npu has no account to charge.
void take_outside(int, uint64_t) {}
void give_back_outside(int, uint64_t) {}

c10::DataPtr adopt_data(c10::DataPtr data, size_t bytes, c10::Device device) {
  const c10::DeviceGuard guard(device);
  auto target = c10::GetAllocator(kNpu)->allocate(bytes);
  if (bytes) std::memcpy(target.mutable_get(), data.get(), bytes);
  return target;
}

// ---- random numbers: torch_npu's generator is a seed and a Philox offset, so the pair seeds a CPU generator and the offset moves on


// torch_npu 2.10 does not give its default generator to PyTorch's hooks; its own function has it in every release
const at::Generator& default_generator(c10::Device device) {
  using Function = const at::Generator& (*)(c10::DeviceIndex);
  static const auto function =
      reinterpret_cast<Function>(dlsym(dlopen("libtorch_npu.so", RTLD_NOLOAD | RTLD_NOW), "_ZN6at_npu6detail22getDefaultNPUGeneratorEa"));
  return function(device.index());
}

at::Generator host_generator(const std::optional<at::Generator>& given, c10::Device device) {
  constexpr uint64_t golden = 0x9E3779B97F4A7C15ull, step = 4;  // the step of a Philox counter
  auto generator = given && given->defined() ? *given : default_generator(device);
  const std::lock_guard<std::mutex> guard(generator.mutex());
  const auto offset = generator.get_offset();
  generator.set_offset(offset + step);
  return at::detail::createCPUGenerator(generator.current_seed() * golden + offset);
}

namespace {

using c10::DispatchKey;
using c10::OperatorHandle;

// What torch_npu answers with its runtime alone. Everything else of it computes.
bool needs_only_memory(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "as_strided", "view", "_reshape_alias", "_unsafe_view",
      "reshape", "alias", "detach", "data", "slice", "select", "transpose", "permute", "expand", "narrow", "squeeze", "unsqueeze", "t",
      "view_as_real", "view_as_complex", "resize_", "resize_as_", "_resize_output_", "set_", "is_set_to", "record_stream", "pin_memory",
      "_pin_memory", "is_pinned", "_has_compatible_shallow_copy_type", "_lazy_clone", "lift", "lift_fresh"};
  return names.count(name) > 0;
}

bool is_composite(const OperatorHandle& op) {
  return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) && !op.hasKernelForDispatchKey(DispatchKey::CPU);
}
bool has_host_kernel(const OperatorHandle& op) {
  for (const auto key : {DispatchKey::CPU, DispatchKey::CompositeImplicitAutograd, DispatchKey::CompositeExplicitAutograd,
                         DispatchKey::CompositeExplicitAutogradNonFunctional}) {
    if (op.hasKernelForDispatchKey(key)) return true;
  }
  return false;
}

// PyTorch's own kernel of another key, on the npu tensors as they are: a composite, or the autograd formula that torch_npu replaced.
template <DispatchKey key>
void stock(const OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  op.getComputedKernelForDispatchKey(key).callBoxed(op, keys, stack);
}

// Operators of aten that torch_npu has a kernel for. Those it has none for reach its own fallback to the CPU; those that only an NPU has
// stay as they are and fail in the fake CANN.
std::vector<std::string> install() {
  static torch::Library npu(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  static torch::Library autograd(torch::Library::IMPL, "aten", DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
  std::vector<std::string> taken;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || needs_only_memory(name.name.substr(6))) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !has_host_kernel(*op)) continue;
    const bool kernel = op->hasKernelForDispatchKey(DispatchKey::PrivateUse1);
    const bool formula = op->hasKernelForDispatchKey(DispatchKey::AutogradPrivateUse1);
    if (!kernel && !formula) continue;
    const auto full_name = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    taken.push_back(full_name);
    // A composite gets both, because a kernel without a formula would cut the graph of its gradients.
    const bool composite = is_composite(*op);
    if (composite || name.name == "aten::_to_copy") {
      npu.impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&stock<DispatchKey::CPU>>());
    } else if (kernel) {
      npu.impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&launch>());
    }
    if (composite || formula) {
      autograd.impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&stock<DispatchKey::AutogradCPU>>());
    }
  }
  add_compute(npu);
  add_recorded(npu);
  return taken;
}

}  // namespace
}  // namespace npusim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", &npusim::install, "replace torch_npu's kernels; returns the operators taken over");
  module.def("add_process_group", [module] { npusim::add_process_group(module.ptr()); }, "define ProcessGroupHCCL in this module");
  npusim::add_launches(module);
  module.def("fallback_count", &npusim::fallback_count, "operators that ran through the fallback so far");
}
