// The operators that the simulated NPU must answer itself: making, viewing, resizing and copying tensors, reading a number. They need the
// device's storage, not its numbers. Then come the few whose PyTorch implementation asks a backend for a fused kernel by name. Everything
// else goes to the fallback.
#include "device.h"
#include "fallback.h"
#include "memory.h"
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace npusim {
namespace {

using at::IntArrayRef;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
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

// ---- copying: device to device, from the host, to the host

Tensor& copy_(Tensor& self, const Tensor& source, bool /*non_blocking: work is done when its call returns*/) {
  if (self.is_same(source)) return self;
  HostCall target_side, source_side;  // two, because a copy is the one operator that may cross devices
  auto target = target_side.to_host(self, true);
  target.copy_(source_side.to_host(source, false));
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  auto writable = target;
  return copy_(writable, self, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  HostCall call;
  return at::native::_local_scalar_dense_cpu(call.to_host(self, false));
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

// ---- convolution

Tensor convolution(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, IntArrayRef stride, IntArrayRef padding,
                   IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  HostCall call;
  return call.to_device(at::convolution(call.to_host(input, false), call.to_host(weight, false), call.to_host(bias), stride, padding,
                                        dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight, IntArrayRef stride,
                                                        IntArrayRef padding, IntArrayRef dilation, bool transposed,
                                                        IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  HostCall call;
  const std::vector<int64_t> bias_size{grad.size(1)};
  const auto bias = mask[2] ? at::OptionalIntArrayRef(bias_size) : at::OptionalIntArrayRef();
  auto [grad_input, grad_weight, grad_bias] =
      at::convolution_backward(call.to_host(grad, false), call.to_host(input, false), call.to_host(weight, false), bias, stride, padding,
                               dilation, transposed, output_padding, groups, mask);
  return {call.to_device(grad_input), call.to_device(grad_weight), call.to_device(grad_bias)};
}

// ---- attention: the CPU decides between its flash kernel and plain operators, and the device follows, so that both give the same numbers

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask, double dropout,
                         bool causal, std::optional<double> scale, bool grouped) {
  constexpr int64_t flash = 1, overrideable = 4, plain = 0;
  const bool mask_learns = mask && mask->defined() && mask->requires_grad();
  if (mask_learns) return plain;  // the fused backward of the CPU has no gradient for the mask
  HostCall call;
  const auto host_mask = mask ? std::make_optional(call.to_host(*mask, false)) : std::nullopt;
  const auto choice = at::_fused_sdp_choice(call.to_host(query, false), call.to_host(key, false), call.to_host(value, false), host_mask,
                                            dropout, causal, scale, grouped);
  return choice == flash ? overrideable : plain;
}

using AttentionResult = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;
AttentionResult attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias, double dropout,
                          bool causal, bool /*return_debug_mask*/, std::optional<double> scale) {
  HostCall call;
  const auto host_bias = bias ? std::make_optional(call.to_host(*bias, false)) : std::nullopt;
  auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      call.to_host(query, false), call.to_host(key, false), call.to_host(value, false), dropout, causal, host_bias, scale);
  return {call.to_device(output), call.to_device(logsumexp), Tensor(), Tensor(), query.sym_size(2), key.sym_size(2), Tensor(), Tensor(),
          Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, std::array<bool, 4> /*mask*/,
    const Tensor& output, const Tensor& logsumexp, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal,
    const Tensor&, const Tensor&, std::optional<double> scale) {
  HostCall call;
  const auto host_bias = bias.defined() ? std::make_optional(call.to_host(bias, false)) : std::nullopt;
  auto [grad_query, grad_key, grad_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      call.to_host(grad, false), call.to_host(query, false), call.to_host(key, false), call.to_host(value, false),
      call.to_host(output, false), call.to_host(logsumexp, false), dropout, causal, host_bias, scale);
  return {call.to_device(grad_query), call.to_device(grad_key), call.to_device(grad_value), Tensor()};
}

// ---- recurrent cells: PyTorch asks accelerators for a fused cell, whose workspace keeps the activated gates for the backward pass.
// They are written with device operators, so they need no aliases.

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) { return bias && bias->defined() ? gates + *bias : gates; }
Tensor sum_rows(const Tensor& gates, bool wanted) { return wanted ? gates.sum(IntArrayRef{0}, false) : Tensor(); }
Tensor sigmoid_gradient(const Tensor& grad, const Tensor& activated) { return grad * activated * (1 - activated); }
Tensor tanh_gradient(const Tensor& grad, const Tensor& activated) { return grad * (1 - activated * activated); }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
                                             const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto in = at::sigmoid(gates[0]), forget = at::sigmoid(gates[1]), candidate = at::tanh(gates[2]), out = at::sigmoid(gates[3]);
  const auto next_cell = forget * cell + in * candidate;
  return {out * at::tanh(next_cell), next_cell, at::cat({in, forget, candidate, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptionalTensor& grad_hidden, const OptionalTensor& grad_cell,
                                                      const Tensor& cell, const Tensor& next_cell, const Tensor& workspace, bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const auto &in = gates[0], &forget = gates[1], &candidate = gates[2], &out = gates[3];
  const auto activated_cell = at::tanh(next_cell);
  auto grad_next = grad_cell && grad_cell->defined() ? *grad_cell : at::zeros_like(next_cell);
  auto grad_out = at::zeros_like(out);
  if (grad_hidden && grad_hidden->defined()) {
    grad_out = *grad_hidden * activated_cell;
    grad_next = grad_next + tanh_gradient(*grad_hidden * out, activated_cell);
  }
  const auto grad_gates = at::cat({sigmoid_gradient(grad_next * candidate, in), sigmoid_gradient(grad_next * cell, forget),
                                   tanh_gradient(grad_next * in, candidate), sigmoid_gradient(grad_out, out)}, 1);
  return {grad_gates, grad_next * forget, sum_rows(grad_gates, has_bias)};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden,
                                    const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto from_input = with_bias(input_gates, input_bias).chunk(3, 1), from_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto reset = at::sigmoid(from_input[0] + from_hidden[0]), update = at::sigmoid(from_input[1] + from_hidden[1]);
  const auto candidate = at::tanh(from_input[2] + reset * from_hidden[2]);
  return {candidate + update * (hidden - candidate), at::cat({reset, update, candidate, hidden, from_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const auto &reset = saved[0], &update = saved[1], &candidate = saved[2], &hidden = saved[3], &hidden_candidate = saved[4];
  const auto grad_candidate = tanh_gradient(grad * (1 - update), candidate);
  const auto grad_update = sigmoid_gradient(grad * (hidden - candidate), update);
  const auto grad_reset = sigmoid_gradient(grad_candidate * hidden_candidate, reset);
  const auto grad_input_gates = at::cat({grad_reset, grad_update, grad_candidate}, 1);
  const auto grad_hidden_gates = at::cat({grad_reset, grad_update, grad_candidate * reset}, 1);
  return {grad_input_gates, grad_hidden_gates, grad * update, sum_rows(grad_input_gates, has_bias), sum_rows(grad_hidden_gates, has_bias)};
}

// ---- registration

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
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
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
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

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &npusim::choose_attention);
}
