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

}  // namespace npusim
