// Operators that accelerators have in one kernel, where the CPU makes a dozen passes over memory. The loops are in rows.cpp.
#include "fused.h"
#include "fallback.h"
#include "rows.h"
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>
#include <limits>
#include <vector>

namespace npusim {
namespace {

using at::IntArrayRef;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// half precision is computed in float, as devices do
at::ScalarType computed_in(const Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

Tensor rows_of(HostCall& call, const Tensor& x, at::ScalarType dtype) { return call.to_host(x, false).to(dtype).contiguous(); }

// ---- root-mean-square norm

Tensor norm_weight(HostCall& call, const OptionalTensor& weight, IntArrayRef shape, at::ScalarType dtype) {
  return weight && weight->defined() ? rows_of(call, *weight, dtype) : at::ones(shape, dtype);
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, IntArrayRef shape, const OptionalTensor& weight, std::optional<double> eps) {
  const auto dtype = computed_in(input);
  const auto kept = input.dim() - static_cast<int64_t>(shape.size());
  TORCH_CHECK(kept >= 0 && input.sizes().slice(kept) == shape, "Given normalized_shape=", shape, ", expected input with shape [*, ",
              shape, "], but got input of size ", input.sizes());
  HostCall call;
  const auto x = rows_of(call, input, dtype), scales = norm_weight(call, weight, shape, dtype);
  static const auto& schema = schema_of("aten::_fused_rms_norm");
  call.check_devices(schema);
  auto rstd_shape = input.sizes().vec();
  std::fill(rstd_shape.begin() + kept, rstd_shape.end(), 1);
  auto out = at::empty(input.sizes(), x.options()), rstd = at::empty(rstd_shape, x.options());
  AT_DISPATCH_FLOATING_TYPES(dtype, "_fused_rms_norm", [&] {
    norm_rows(x.const_data_ptr<scalar_t>(), scales.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>(),
              rstd.mutable_data_ptr<scalar_t>(), rstd.numel(), c10::multiply_integers(shape),
              eps.value_or(std::numeric_limits<scalar_t>::epsilon()));
  });
  return {call.to_device(out.to(input.scalar_type())), call.to_device(rstd)};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& input, IntArrayRef shape, const Tensor& rstd,
                                             const OptionalTensor& weight, std::array<bool, 2> wanted) {
  const auto dtype = computed_in(input);
  const auto size = c10::multiply_integers(shape);
  HostCall call;
  const auto g = rows_of(call, grad, dtype), x = rows_of(call, input, dtype), scale = rows_of(call, rstd, dtype);
  const auto scales = norm_weight(call, weight, shape, dtype);
  static const auto& schema = schema_of("aten::_fused_rms_norm_backward");
  call.check_devices(schema);
  auto grad_input = wanted[0] ? at::empty_like(x) : Tensor();
  auto grad_weight = wanted[1] ? at::zeros(shape, at::kDouble) : Tensor();
  AT_DISPATCH_FLOATING_TYPES(dtype, "_fused_rms_norm_backward", [&] {
    std::vector<scalar_t> block(wanted[1] ? size : 0);
    const NormGradients<scalar_t> to{wanted[0] ? grad_input.mutable_data_ptr<scalar_t>() : nullptr, block.data(),
                                     wanted[1] ? grad_weight.mutable_data_ptr<double>() : nullptr};
    norm_backward_rows(g.const_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(), scales.const_data_ptr<scalar_t>(),
                       scale.const_data_ptr<scalar_t>(), to, scale.numel(), size);
  });
  return {wanted[0] ? call.to_device(grad_input.to(input.scalar_type())) : Tensor(),
          wanted[1] ? call.to_device(grad_weight.to(weight->scalar_type())) : Tensor()};
}

// ---- gated linear unit: silu(gate) * value of [..., gate | value]

Tensor swiglu(const Tensor& input) {
  HostCall call;
  const auto x = rows_of(call, input, at::kFloat);
  static const auto& schema = schema_of("npusim::swiglu");
  call.check_devices(schema);
  auto shape = input.sizes().vec();
  TORCH_CHECK(!shape.empty() && shape.back() % 2 == 0, "swiglu: the last dimension of ", input.sizes(), " has no two halves");
  shape.back() /= 2;
  auto out = at::empty(shape, x.options());
  if (out.numel()) swiglu_rows(x.const_data_ptr<float>(), out.mutable_data_ptr<float>(), out.numel() / shape.back(), shape.back());
  return call.to_device(out.to(input.scalar_type()));
}

Tensor swiglu_backward(const Tensor& grad, const Tensor& input) {
  HostCall call;
  const auto g = rows_of(call, grad, at::kFloat), x = rows_of(call, input, at::kFloat);
  static const auto& schema = schema_of("npusim::swiglu_backward");
  call.check_devices(schema);
  auto grad_input = at::empty_like(x);
  const auto half = input.size(-1) / 2;
  if (g.numel()) swiglu_backward_rows(g.const_data_ptr<float>(), x.const_data_ptr<float>(), grad_input.mutable_data_ptr<float>(),
                                      g.numel() / half, half);
  return call.to_device(grad_input.to(input.scalar_type()));
}

// ---- rotary position embedding of the last dimension; cosines and sines are broadcast over the others

// Rows one after the other, so many of which share a rotation
struct Rotations {
  Tensor cos, sin;
  int64_t sharing = 1;
};

Rotations rotations_of(HostCall& call, const Tensor& x, const Tensor& cos, const Tensor& sin) {
  TORCH_CHECK(cos.sizes() == sin.sizes() && cos.dim() == x.dim() && cos.size(-1) == x.size(-1) && x.size(-1) % 2 == 0,
              "rotary: input of size ", x.sizes(), ", cosines of ", cos.sizes(), " and sines of ", sin.sizes());
  Rotations found{rows_of(call, cos, at::kFloat), rows_of(call, sin, at::kFloat)};
  auto shape = x.sizes().vec();
  for (auto dim = x.dim() - 2; dim >= 0 && cos.size(dim) == 1; --dim) {
    found.sharing *= shape[dim];
    shape[dim] = 1;
  }
  found.cos = found.cos.expand(shape).contiguous();
  found.sin = found.sin.expand(shape).contiguous();
  return found;
}

template <typename Loop>
Tensor each_rotation(const Tensor& x, const Rotations& by, Loop loop) {
  auto out = at::empty_like(x);
  const auto size = x.size(-1), rotations = by.cos.numel() / size, step = by.sharing * size;
  const auto *from = x.const_data_ptr<float>(), *cos = by.cos.const_data_ptr<float>(), *sin = by.sin.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < rotations; ++i) loop(from + i * step, cos + i * size, sin + i * size, to + i * step, by.sharing, size);
  return out;
}

template <auto loop>
Tensor rotated(const Tensor& input, const Tensor& cos, const Tensor& sin, const c10::FunctionSchema& schema) {
  HostCall call;
  const auto x = rows_of(call, input, at::kFloat);
  const auto by = rotations_of(call, input, cos, sin);
  call.check_devices(schema);
  return call.to_device(each_rotation(x, by, loop).to(input.scalar_type()));
}

Tensor rotary(const Tensor& input, const Tensor& cos, const Tensor& sin) {
  static const auto& schema = schema_of("npusim::rotary");
  return rotated<rotary_rows>(input, cos, sin, schema);
}

Tensor rotary_backward(const Tensor& grad, const Tensor& cos, const Tensor& sin) {
  static const auto& schema = schema_of("npusim::rotary_backward");
  return rotated<rotary_backward_rows>(grad, cos, sin, schema);
}

TORCH_LIBRARY(npusim, m) {
  m.def("swiglu(Tensor input) -> Tensor");
  m.def("swiglu_backward(Tensor grad, Tensor input) -> Tensor");
  m.def("rotary(Tensor input, Tensor cos, Tensor sin) -> Tensor");
  m.def("rotary_backward(Tensor grad, Tensor cos, Tensor sin) -> Tensor");
}
TORCH_LIBRARY_IMPL(npusim, PrivateUse1, m) {
  m.impl("swiglu", swiglu);
  m.impl("swiglu_backward", swiglu_backward);
  m.impl("rotary", rotary);
  m.impl("rotary_backward", rotary_backward);
}

}  // namespace

void add_fused(torch::Library& m) {
  m.impl("_fused_rms_norm", rms_norm);
  m.impl("_fused_rms_norm_backward", rms_norm_backward);
}

}  // namespace npusim
