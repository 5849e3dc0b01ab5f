// Matrix products. PyTorch's CPU build has two libraries for them and takes MKL in single precision, which uses half as wide registers on
// processors that are not Intel's. oneDNN uses what the processor has: on an EPYC of the fifth generation it is twice as fast.
#include "matmul.h"
#include "fallback.h"
#include <ATen/Context.h>
#include <ATen/Version.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

namespace at::native {
// result = beta * result + alpha * a @ b; the library has it, its headers do not
TORCH_API void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& result, float beta, float alpha);
}

namespace npusim {
namespace {

using at::Tensor;

bool has_onednn() {
#if defined(__x86_64__)
  // PyTorch's function refuses processors without AVX-512, in single precision too
  static const bool wide = at::get_cpu_capability().rfind("AVX512", 0) == 0;
  return wide && at::globalContext().hasMKLDNN() && at::globalContext().userEnabledMkldnn();
#else
  return false;  // MKL is not there, either
#endif
}

bool is_matrix(const Tensor& t) { return t.dim() == 2 && t.scalar_type() == at::kFloat; }

// oneDNN looks up the program of a shape first, which takes as long as a small product; a product of few rows only reads memory.
bool is_large(const Tensor& a, const Tensor& b) {
  constexpr int64_t terms = int64_t{1} << 20, few = 4;
  if (!is_matrix(a) || !is_matrix(b) || a.size(1) != b.size(0)) return false;
  return a.size(0) >= few && b.size(1) >= few && a.numel() * b.size(1) >= terms && has_onednn();
}

Tensor mm(const Tensor& self, const Tensor& other) {
  static const auto& schema = schema_of("aten::mm");
  HostCall call;
  const auto a = call.to_host(self, false), b = call.to_host(other, false);
  call.check_devices(schema);
  if (!is_large(a, b)) return call.to_device(at::mm(a, b));
  const auto out = at::empty({a.size(0), b.size(1)}, a.options());
  at::native::mkldnn_matmul(a, b, out, 0, 1);
  return call.to_device(out);
}

Tensor addmm(const Tensor& self, const Tensor& first, const Tensor& second, const at::Scalar& beta, const at::Scalar& alpha) {
  static const auto& schema = schema_of("aten::addmm");
  HostCall call;
  const auto added = call.to_host(self, false), a = call.to_host(first, false), b = call.to_host(second, false);
  call.check_devices(schema);
  const bool plain = beta.equal(1) && alpha.equal(1) && added.scalar_type() == at::kFloat;
  if (!plain || !is_large(a, b)) return call.to_device(at::addmm(added, a, b, beta, alpha));
  const auto out = at::empty({a.size(0), b.size(1)}, a.options());
  out.copy_(added.expand(out.sizes()));
  at::native::mkldnn_matmul(a, b, out, 1, 1);
  return call.to_device(out);
}

}  // namespace

void add_matmul(torch::Library& m) {
  m.impl("mm", mm);
  m.impl("addmm", addmm);
}

}  // namespace npusim
