// Compiled with strict arithmetic: sums are taken in a fixed number of lanes, so that every machine gets the same numbers.
#include "rows.h"
#include <bit>
#include <cmath>
#include <limits>

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

template <int64_t lanes, typename T>
INLINE T sum_lanes(const T* sums) {
  if constexpr (lanes == 1) {
    return sums[0];
  } else {
    T halves[lanes / 2];
    for (int64_t lane = 0; lane < lanes / 2; ++lane) halves[lane] = sums[lane] + sums[lane + lanes / 2];
    return sum_lanes<lanes / 2>(halves);
  }
}

template <typename T, int64_t lanes = kLanes, typename Term>
INLINE T sum_of(int64_t size, Term term) {
  T sums[lanes] = {};
  const int64_t whole = size - size % lanes;
  for (int64_t i = 0; i < whole; i += lanes)
    for (int64_t lane = 0; lane < lanes; ++lane) sums[lane] += term(i + lane);
  for (int64_t i = whole; i < size; ++i) sums[i - whole] += term(i);
  return sum_lanes<lanes>(sums);
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

// weights of a softmax, times their sum; returns that sum. A key that must not be seen has a score of minus infinity; if no key may be seen,
// all weights are zero and their sum is one, as in the CPU's kernel
INLINE float softmax_weights(float* scores, int64_t keys) {
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t t = 0; t < keys; ++t) top = scores[t] > top ? scores[t] : top;
  if (top == -std::numeric_limits<float>::infinity()) {
    for (int64_t t = 0; t < keys; ++t) scores[t] = 0;
    return 1;
  }
  constexpr float unseen = -87.0f;  // exponential is not zero there
  for (int64_t t = 0; t < keys; ++t) scores[t] = scores[t] - top < unseen ? 0.0f : exponential(scores[t] - top);
  return sum_of<float>(keys, [scores](int64_t t) { return scores[t]; });
}

template <int64_t lanes>
INLINE void score_keys(const float* query, const float* keys, const float* bias, const AttentionSizes& sizes, float* scores) {
  for (int64_t t = 0; t < sizes.keys; ++t, keys += sizes.key_stride) {
    const float product = sum_of<float, lanes>(sizes.head, [=](int64_t i) { return query[i] * keys[i]; });
    scores[t] = product * sizes.scale + (bias ? bias[t] : 0.0f);
  }
}

// some columns of the values, in registers
template <int columns>
INLINE void weighted_sum(const float* weights, const float* values, const AttentionSizes& sizes, float total, float* out) {
  float sums[columns] = {};
  for (int64_t t = 0; t < sizes.keys; ++t, values += sizes.value_stride)
    for (int i = 0; i < columns; ++i) sums[i] += weights[t] * values[i];
  for (int i = 0; i < columns; ++i) out[i] = sums[i] / total;
}

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

EVERY_WIDTH void attend(const float* query, const float* keys, const float* values, const float* bias, AttentionSizes sizes, float* scores,
                        float* out) {
  if (sizes.head % kLanes == 0)
    score_keys<kLanes>(query, keys, bias, sizes, scores);
  else
    score_keys<kLanes / 2>(query, keys, bias, sizes, scores);
  const float total = softmax_weights(scores, sizes.keys);
  int64_t i = 0;
  for (; i + 64 <= sizes.head; i += 64) weighted_sum<64>(scores, values + i, sizes, total, out + i);
  for (; i + 16 <= sizes.head; i += 16) weighted_sum<16>(scores, values + i, sizes, total, out + i);
  for (; i + 8 <= sizes.head; i += 8) weighted_sum<8>(scores, values + i, sizes, total, out + i);
  for (; i < sizes.head; ++i) weighted_sum<1>(scores, values + i, sizes, total, out + i);
}

EVERY_WIDTH void rotary_rows(const float* __restrict x, const float* cos, const float* sin, float* __restrict out, int64_t rows, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t row = 0; row < rows; ++row, x += size, out += size) {
    for (int64_t i = 0; i < half; ++i) out[i] = x[i] * cos[i] - x[half + i] * sin[i];
    for (int64_t i = half; i < size; ++i) out[i] = x[i] * cos[i] + x[i - half] * sin[i];
  }
}

EVERY_WIDTH void rotary_backward_rows(const float* __restrict grad, const float* cos, const float* sin, float* __restrict grad_x, int64_t rows,
                                      int64_t size) {
  const int64_t half = size / 2;
  for (int64_t row = 0; row < rows; ++row, grad += size, grad_x += size) {
    for (int64_t i = 0; i < half; ++i) grad_x[i] = grad[i] * cos[i] + grad[half + i] * sin[half + i];
    for (int64_t i = half; i < size; ++i) grad_x[i] = grad[i] * cos[i] - grad[i - half] * sin[i - half];
  }
}

}  // namespace npusim
