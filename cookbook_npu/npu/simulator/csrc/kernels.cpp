// The operators that the simulated NPU must answer itself: making, viewing and resizing tensors. They need the device's storage, not its
// numbers. compute.cpp has those that are computed by hand; everything else goes to the fallback.
#include "compute.h"
#include "device.h"
#include "fallback.h"
#include "fused.h"
#include "matmul.h"
#include "memory.h"
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace npusim {
namespace {

using at::IntArrayRef;
using at::Tensor;
constexpr c10::DispatchKeySet kNpuKey(c10::DispatchKey::PrivateUse1);

// ---- making tensors

c10::Device wanted_device(std::optional<c10::Device> device) { return npu(device ? device->index() : -1); }

void refuse_pinned(std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned, not npu tensors");
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device> device,
             std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  refuse_pinned(pinned);
  const c10::DeviceGuard guard(wanted_device(device));
  return at::detail::empty_generic(size, device_allocator(), kNpuKey, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<c10::Device> device, std::optional<bool> pinned) {
  refuse_pinned(pinned);
  const c10::DeviceGuard guard(wanted_device(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kNpuKey, c10::dtype_or_default(dtype));
}

// ---- views and resizing: PyTorch's own implementations work on any strided storage

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }
Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) { return at::native::_reshape_alias(self, size, stride); }

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}
Tensor& set_source_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_source_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
Tensor& set_source_storage_offset(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}
Tensor& set_nothing(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return self.set_(nothing, 0, {0}, {});
}
void record_stream(Tensor&, at::Stream) {}

// Without this answer module.to("npu") replaces each parameter instead of moving it in place, and tied weights silently come apart.
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

// ---- memory of other processes

int64_t export_memory(const Tensor& self) { return export_storage(self.storage()); }

Tensor open_memory(int64_t descriptor, int64_t nbytes, int64_t device) {
  const auto target = npu(static_cast<int>(device));
  auto data = open_exported(static_cast<int>(descriptor), static_cast<size_t>(nbytes), target.index());
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, std::move(data), nullptr, false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), kNpuKey, caffe2::TypeMeta::Make<uint8_t>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({nbytes});
  return tensor;
}

// ---- registration

TORCH_LIBRARY_FRAGMENT(npusim, m) {
  m.def("export_memory(Tensor self) -> int");
  m.def("open_memory(int descriptor, int nbytes, int device) -> Tensor", open_memory);
}
TORCH_LIBRARY_IMPL(npusim, PrivateUse1, m) { m.impl("export_memory", export_memory); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Tensor", set_source_tensor);
  m.impl("set_.source_Storage", set_source_storage);
  m.impl("set_.source_Storage_storage_offset", set_source_storage_offset);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  add_compute(m);
  add_fused(m);
  add_matmul(m);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace

// PyTorch would build many operators (add, mul, mm, every _foreach_) for an unknown backend out of smaller steps, each with its own trip
// through the dispatcher. The CPU has one kernel for them, so the fallback takes them whole: half the cost of a small operator.
void take_composite_operators() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    const bool built_from_out = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) &&
                                op->hasKernelForDispatchKey(c10::DispatchKey::CPU);
    const bool per_tensor_loop = name.name.rfind("aten::_foreach_", 0) == 0 &&
                                 op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
    if (!built_from_out && !per_tensor_loop) continue;
    const auto full_name = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library->impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace npusim
