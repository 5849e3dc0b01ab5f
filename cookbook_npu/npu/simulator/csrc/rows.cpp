// Compiled with strict arithmetic: sums are taken in a fixed number of lanes, so that every machine gets the same numbers.
#include "rows.h"
#include <bit>
#include <cmath>

// for wide registers as well; which one runs is chosen when the library is loaded
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define EVERY_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EVERY_WIDTH
#endif
#define INLINE inline __attribute__((always_inline))

namespace npusim {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kRows = 32;  // whose weight gradients are summed in their own precision, before they join the total

template <typename T, typename Term>
INLINE T sum_of(int64_t size, Term term) {
  T lanes[kLanes] = {};
  const int64_t whole = size - size % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  for (int64_t i = whole; i < size; ++i) lanes[i - whole] += term(i);
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

template <typename T>
INLINE void norm(const T* x, const T* weight, T* out, T* rstd, int64_t rows, int64_t size, T eps) {
  for (int64_t row = 0; row < rows; ++row, x += size, out += size) {
    const T mean = sum_of<T>(size, [x](int64_t i) { return x[i] * x[i]; }) / static_cast<T>(size);
    const T scale = 1 / std::sqrt(mean + eps);
    rstd[row] = scale;
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] * scale * weight[i];
  }
}

template <typename T>
INLINE void norm_backward(const T* grad, const T* x, const T* weight, const T* rstd, NormGradients<T> to, int64_t rows, int64_t size) {
  for (int64_t row = 0; row < rows; ++row, grad += size, x += size) {
    const T scale = rstd[row];
    if (to.weight) {
      for (int64_t i = 0; i < size; ++i) to.block[i] += grad[i] * x[i] * scale;
    }
    if (to.weight && ((row + 1) % kRows == 0 || row + 1 == rows)) {
      for (int64_t i = 0; i < size; ++i) to.weight[i] += to.block[i];
      for (int64_t i = 0; i < size; ++i) to.block[i] = 0;
    }
    if (to.input) {
      const T along = sum_of<T>(size, [=](int64_t i) { return grad[i] * weight[i] * x[i]; });
      const T back = along * scale * scale * scale / static_cast<T>(size);
      for (int64_t i = 0; i < size; ++i) to.input[i] = grad[i] * weight[i] * scale - x[i] * back;
      to.input += size;
    }
  }
}

// exp of numbers that a float can hold the result of, to one unit in the last place: 2^k e^r with |r| <= log(2)/2
INLINE float exponential(float x) {
  x = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
  constexpr float to_integer = 12582912.0f;  // 1.5 * 2^23: sums with it have no fraction
  const float k = (x * 1.44269504f + to_integer) - to_integer;
  const float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
  // minimax polynomial of degree 5 for (e^r - 1 - r) / r^2, of the Cephes library
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float e = p * r * r + r + 1.0f;
  return e * std::bit_cast<float>((static_cast<int32_t>(k) + 127) << 23);
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

}  // namespace

EVERY_WIDTH void norm_rows(const float* x, const float* weight, float* out, float* rstd, int64_t rows, int64_t size, double eps) {
  norm<float>(x, weight, out, rstd, rows, size, static_cast<float>(eps));
}
EVERY_WIDTH void norm_rows(const double* x, const double* weight, double* out, double* rstd, int64_t rows, int64_t size, double eps) {
  norm<double>(x, weight, out, rstd, rows, size, eps);
}
EVERY_WIDTH void norm_backward_rows(const float* grad, const float* x, const float* weight, const float* rstd, NormGradients<float> to,
                                    int64_t rows, int64_t size) {
  norm_backward<float>(grad, x, weight, rstd, to, rows, size);
}
EVERY_WIDTH void norm_backward_rows(const double* grad, const double* x, const double* weight, const double* rstd,
                                    NormGradients<double> to, int64_t rows, int64_t size) {
  norm_backward<double>(grad, x, weight, rstd, to, rows, size);
}

EVERY_WIDTH void swiglu_rows(const float* x, float* out, int64_t rows, int64_t half) {
  for (int64_t row = 0; row < rows; ++row, x += 2 * half, out += half) {
    const float* value = x + half;
    for (int64_t i = 0; i < half; ++i) out[i] = x[i] * sigmoid(x[i]) * value[i];
  }
}

EVERY_WIDTH void swiglu_backward_rows(const float* __restrict grad, const float* __restrict x, float* __restrict grad_x, int64_t rows, int64_t half) {
  for (int64_t row = 0; row < rows; ++row, grad += half, x += 2 * half, grad_x += 2 * half) {
    const float* value = x + half;
    float* __restrict grad_value = grad_x + half;
    for (int64_t i = 0; i < half; ++i) {
      const float open = sigmoid(x[i]);
      grad_value[i] = grad[i] * (x[i] * open);
      grad_x[i] = grad[i] * value[i] * (open * (1.0f + x[i] * (1.0f - open)));
    }
  }
}

}  // namespace npusim
