// What every lane of simulation computes by hand on the host: copies, reading a number, and the few operators for which PyTorch asks a backend
// by name for a fused kernel. They need tensors of the device, but nothing of how the device makes them.
#include "compute.h"
#include "fallback.h"
#include "rows.h"
#include <ATen/TensorOperators.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>
#include <cmath>
#include <vector>

namespace npusim {
namespace {

using at::IntArrayRef;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

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

// A decode step asks for few queries of many keys, for which the CPU's kernel makes a matrix product each. Its gradient is never asked for.
bool is_decode(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias, double dropout, bool causal) {
  constexpr int64_t few = 16;
  const auto floats = [](const Tensor& t) { return t.scalar_type() == at::kFloat; };
  const auto rows = [&](const Tensor& t) { return floats(t) && t.stride(-1) == 1; };
  return !at::GradMode::is_enabled() && query.size(2) <= few && query.sizes().slice(0, 2) == key.sizes().slice(0, 2) &&
         key.sizes() == value.sizes() && rows(query) && rows(key) && rows(value) && (!bias || floats(*bias)) && dropout == 0 && !causal;
}

const float* head_of(const Tensor& t, int64_t b, int64_t h) { return t.const_data_ptr<float>() + b * t.stride(0) + h * t.stride(1); }

Tensor decode_attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias, double scale) {
  const auto B = query.size(0), H = query.size(1), Q = query.size(2), K = key.size(2), D = query.size(3);
  auto added = bias ? bias->expand({B, H, Q, K}) : Tensor();
  if (bias && added.stride(3) != 1) added = added.contiguous();
  auto out = at::empty({B, H, Q, D}, query.options());
  auto* to = out.mutable_data_ptr<float>();
  std::vector<float> scores(K);
  const AttentionSizes sizes{K, D, key.stride(2), value.stride(2), static_cast<float>(scale)};
  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t q = 0; q < Q; ++q, to += D) {
        const auto* row = bias ? head_of(added, b, h) + q * added.stride(2) : nullptr;
        attend(head_of(query, b, h) + q * query.stride(2), head_of(key, b, h), head_of(value, b, h), row, sizes, scores.data(), to);
      }
  return out;
}

using AttentionResult = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;
AttentionResult attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias, double dropout,
                          bool causal, bool /*return_debug_mask*/, std::optional<double> scale) {
  HostCall call;
  const auto host_bias = bias && bias->defined() ? std::make_optional(call.to_host(*bias, false)) : std::nullopt;
  if (is_decode(query, key, value, host_bias, dropout, causal)) {
    const auto found = decode_attention(call.to_host(query, false), call.to_host(key, false), call.to_host(value, false), host_bias,
                                        scale.value_or(1 / std::sqrt(static_cast<double>(query.size(3)))));
    return {call.to_device(found), Tensor(), Tensor(), Tensor(), query.sym_size(2), key.sym_size(2), Tensor(), Tensor(), Tensor()};
  }
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

}  // namespace

void add_compute(torch::Library& m) {
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace npusim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &npusim::choose_attention);
}
