// The loops of fused.cpp, over rows of contiguous numbers. `double` in, `double` inside; everything else is computed in float.
#pragma once
#include <cstdint>

namespace npusim {

template <typename T>
struct NormGradients {
  T* input;        // [rows, size], or none
  T* block;        // [size], zero: room to work in
  double* weight;  // [size], or none: the sum over rows is added
};

// out = x / rms(x) * weight
void norm_rows(const float* x, const float* weight, float* out, float* rstd, int64_t rows, int64_t size, double eps);
void norm_rows(const double* x, const double* weight, double* out, double* rstd, int64_t rows, int64_t size, double eps);
void norm_backward_rows(const float* grad, const float* x, const float* weight, const float* rstd, NormGradients<float> to, int64_t rows,
                        int64_t size);
void norm_backward_rows(const double* grad, const double* x, const double* weight, const double* rstd, NormGradients<double> to,
                        int64_t rows, int64_t size);

// out = silu(gate) * value of rows [gate | value]
void swiglu_rows(const float* x, float* out, int64_t rows, int64_t half);
void swiglu_backward_rows(const float* grad, const float* x, float* grad_x, int64_t rows, int64_t half);

// out = (a * cos - b * sin, b * cos + a * sin) of rows (a, b), which all have the same rotation of `size` cosines and sines
void rotary_rows(const float* x, const float* cos, const float* sin, float* out, int64_t rows, int64_t size);
void rotary_backward_rows(const float* grad, const float* cos, const float* sin, float* grad_x, int64_t rows, int64_t size);

struct AttentionSizes {
  int64_t keys, head;                // number of keys, size of each
  int64_t key_stride, value_stride;  // from one to the next
  float scale;                       // of the scores
};

// out = softmax(scale * query . keys) . values for one query of one head; `bias`, added to the scores, may be none; `scores` is room to work in
void attend(const float* query, const float* keys, const float* values, const float* bias, AttentionSizes sizes, float* scores, float* out);

}  // namespace npusim
